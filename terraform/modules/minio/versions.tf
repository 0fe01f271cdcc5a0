terraform {
  required_version = ">= 1.9" # validations that look at other variables

  required_providers {
    minio = {
      source  = "aminueza/minio"
      version = ">= 3.0"
    }
  }
}
