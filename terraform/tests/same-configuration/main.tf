# What a configuration makes beside the cache is not known when it is planned; the module must not mind.

terraform {
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.80"
    }
  }
}

resource "aws_kms_key" "mine" {}

resource "aws_s3_bucket" "logs" {}

resource "aws_vpc" "mine" {}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.mine.id
}

resource "aws_sns_topic" "alarms" {}

resource "aws_eks_cluster" "mine" {
  name     = "mine"
  role_arn = "arn:aws:iam::123456789012:role/cluster"

  vpc_config {
    subnet_ids = ["subnet-1"]
  }
}

module "cache" {
  source = "../.."

  bucket_name      = "encoder-cache"
  kms_key          = { arn = aws_kms_key.mine.arn }
  access_log       = { bucket = aws_s3_bucket.logs.id }
  request_metrics  = true
  alarm_topic_arns = [aws_sns_topic.alarms.arn]

  gateway_endpoint = {
    vpc_id          = aws_vpc.mine.id
    route_table_ids = [aws_route_table.private.id]
  }
}

module "server" {
  source = "../../modules/eks-identity"

  name            = "server"
  cluster_arn     = aws_eks_cluster.mine.arn
  namespace       = "vllm"
  service_account = "vllm"
  policy_arn      = module.cache.policy_arns.writer
}

output "roles" {
  value = keys(module.cache.policy_arns)
}
