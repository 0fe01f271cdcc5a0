terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.80"
    }
  }
}

provider "aws" {
  region = "us-east-1"
}

module "cache" {
  source = "../../modules/express"

  bucket_name = "example-encoder-cache"
  zone_id     = "use1-az4"
}

output "environment" {
  description = "What a server needs to find the cache."
  value       = module.cache.environment.writer
}

output "policy_arn" {
  description = "The policy to attach to the server's role."
  value       = module.cache.policy_arns.writer
}
