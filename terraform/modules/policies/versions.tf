terraform {
  required_version = ">= 1.9" # validations that look at other variables
}
