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

locals {
  tags = {
    team    = "inference"
    service = "encoder-cache"
  }
}

data "aws_vpc" "this" {
  tags = { Name = "inference" }
}

data "aws_route_tables" "private" {
  vpc_id = data.aws_vpc.this.id
  tags   = { Tier = "private" }
}

data "aws_iam_openid_connect_provider" "this" {
  url = "https://oidc.eks.eu-west-1.amazonaws.com/id/EXAMPLE"
}

data "aws_sns_topic" "alarms" {
  name = "inference-alarms"
}

module "cache" {
  source = "../.."

  bucket_name      = "example-encoder-cache"
  prefix           = "team-a"
  expire_days      = 14
  further_prefixes = { team-b = 7 }
  tagged           = true
  access_log       = { bucket = "example-access-logs" }
  request_metrics  = true
  alarm_topic_arns = [data.aws_sns_topic.alarms.arn]
  tags             = local.tags

  gateway_endpoint = {
    vpc_id           = data.aws_vpc.this.id
    route_table_ids  = data.aws_route_tables.private.ids
    readable_buckets = ["prod-eu-west-1-starport-layer-bucket"] # image layers of ECR
  }
}

# The second tenant: rights of its own in the same bucket.
module "team_b" {
  source = "../../modules/policies"

  bucket  = module.cache.bucket_name
  prefix  = "team-b"
  key_arn = module.cache.kms_key_arn
  region  = "eu-west-1"
}

resource "aws_iam_policy" "team_b" {
  name   = "example-encoder-cache-team-b-writer"
  policy = module.team_b.role_policies.writer
  tags   = local.tags
}

module "server" {
  source   = "../../modules/eks-identity"
  for_each = { team-a = module.cache.policy_arns.writer, team-b = aws_iam_policy.team_b.arn }

  name              = "example-encoder-cache-${each.key}"
  mode              = "irsa"
  oidc_provider_arn = data.aws_iam_openid_connect_provider.this.arn
  namespace         = each.key
  service_account   = "vllm"
  policy_arn        = each.value
  tags              = local.tags
}

output "cache_urls" {
  description = "EC_S3_URL of each tenant."
  value = {
    team-a = module.cache.cache_url
    team-b = module.team_b.cache_url
  }
}

output "environment" {
  description = "Environment of the first tenant's servers."
  value       = module.cache.environment.writer
}

output "service_account_annotations" {
  description = "Annotations of each tenant's service account."
  value       = { for tenant, server in module.server : tenant => server.service_account_annotations }
}
