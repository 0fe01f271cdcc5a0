terraform {
  required_version = ">= 1.9" # validations that look at other variables

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.80" # as the root module
    }
  }
}
