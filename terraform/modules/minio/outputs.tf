output "bucket_name" {
  description = "Name of the bucket."
  value       = minio_s3_bucket.this.bucket
}

output "bucket_arn" {
  description = "ARN of the bucket."
  value       = minio_s3_bucket.this.arn
}

output "cache_url" {
  description = "Where the cache is, for EC_S3_URL."
  value       = module.policies.cache_url
}

output "environment" {
  description = "Environment of servers and jobs, by role, but for `credentials`. Those that write also renew items in use before they expire."
  value = {
    for role in ["reader", "writer", "prewarm", "maintainer"] : role => merge(
      { EC_S3_URL = module.policies.cache_url },
      role == "reader" ? {} : { EC_S3_OBJECT_LIFETIME = "${var.expire_days}d" },
    )
  }
}

output "policy_arns" {
  description = "Name of the policy of each role in `roles`: MinIO has no ARNs for them."
  value       = { for role, policy in minio_iam_policy.this : role => policy.name }
}

output "policy_documents" {
  description = "Policy of each role as JSON."
  value       = module.policies.role_policies
}

output "credentials" {
  description = "Access keys of each role in `roles`, as environment variables. They are in the state, too: keep that where secrets may lie."
  sensitive   = true
  value = {
    for role, account in minio_iam_service_account.this : role => {
      AWS_ACCESS_KEY_ID     = account.access_key
      AWS_SECRET_ACCESS_KEY = account.secret_key
    }
  }
}
