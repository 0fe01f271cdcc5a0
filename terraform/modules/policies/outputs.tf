output "role_policies" {
  description = "IAM policy of each role, as JSON: reader, writer, prewarm, maintainer."
  value = {
    for role, statements in local.role_statements :
    role => jsonencode({ Version = "2012-10-17", Statement = statements })
  }
}

output "bucket_policy" {
  description = "Policy of the bucket, as JSON: TLS 1.2 or later, no customers' keys."
  value       = jsonencode({ Version = "2012-10-17", Statement = local.deny_statements })
}

output "endpoint_policy" {
  description = "Policy of a gateway endpoint, as JSON: this bucket for this account, and `readable_buckets`."
  value       = jsonencode({ Version = "2012-10-17", Statement = local.endpoint_statements })
}

output "cache_url" {
  description = "Where the cache is, for EC_S3_URL."
  value       = join("?", compact([local.url, join("&", local.url_arguments)]))
}

output "items_prefix" {
  description = "Prefix of the items, for a lifecycle rule."
  value       = "${local.below}v1/"
}
