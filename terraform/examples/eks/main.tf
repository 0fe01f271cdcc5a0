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
  region = "eu-west-1"
}

data "aws_eks_cluster" "this" {
  name = "example"
}

module "cache" {
  source = "../.."

  bucket_name = "example-encoder-cache"
}

module "server" {
  source = "../../modules/eks-identity"

  name            = "example-encoder-cache-server"
  cluster_arn     = data.aws_eks_cluster.this.arn
  namespace       = "vllm"
  service_account = "vllm"
  policy_arn      = module.cache.policy_arns.writer
}

module "prewarm" {
  source = "../../modules/eks-identity"

  name            = "example-encoder-cache-prewarm"
  cluster_arn     = data.aws_eks_cluster.this.arn
  namespace       = "vllm"
  service_account = "prewarm"
  policy_arn      = module.cache.policy_arns.prewarm
}

output "environment" {
  description = "Environment of the servers."
  value       = module.cache.environment.writer
}

output "role_arns" {
  description = "Roles of the servers and of the prewarm job."
  value = {
    server  = module.server.role_arn
    prewarm = module.prewarm.role_arn
  }
}
