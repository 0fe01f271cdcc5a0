# The root module and an identity against an S3 server on this machine; a test puts it beside terraform/.

terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.80"
    }
  }
}

variable "server" {
  type = string
}

provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "testing"
  secret_key                  = "testing"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true

  endpoints {
    s3  = var.server
    iam = var.server
    sts = var.server
    kms = var.server
  }
}

module "cache" {
  source = "../terraform"

  bucket_name      = "encoder-cache"
  prefix           = "team/cache"
  expire_days      = 14
  further_prefixes = { other = 7 }
  force_destroy    = true
  tagged           = true
  tags             = { team = "ml" }
}

module "identity" {
  source = "../terraform/modules/eks-identity"

  name              = "encoder-cache-server"
  mode              = "irsa"
  oidc_provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC"
  namespace         = "vllm"
  service_account   = "vllm"
  policy_arn        = module.cache.policy_arns.writer
}

output "cache" {
  value = module.cache
}

output "role_arn" {
  value = module.identity.role_arn
}
