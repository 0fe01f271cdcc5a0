output "bucket_name" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "cache_url" {
  description = "Where the cache is, for EC_S3_URL."
  value       = module.policies.cache_url
}

output "environment" {
  description = "Environment of servers and jobs, by role. Those that write also renew items in use before they expire."
  value = {
    for role in ["reader", "writer", "prewarm", "maintainer"] : role => merge(
      { EC_S3_URL = module.policies.cache_url },
      role == "reader" ? {} : { EC_S3_OBJECT_LIFETIME = "${var.expire_days}d" },
    )
  }
}

output "policy_arns" {
  description = "ARN of the managed policy of each role in `roles`, to attach to whatever runs it."
  value       = { for role, policy in aws_iam_policy.this : role => policy.arn }
}

output "policy_documents" {
  description = "IAM policy of each role as JSON, for those who attach it otherwise."
  value       = module.policies.role_policies
}

output "kms_key_arn" {
  description = "ARN of the key that encrypts the bucket; empty for SSE-S3."
  value       = local.key_arn
}

output "vpc_endpoint_id" {
  description = "ID of the gateway endpoint; empty without one."
  value       = one(aws_vpc_endpoint.this[*].id) == null ? "" : one(aws_vpc_endpoint.this[*].id)
}
