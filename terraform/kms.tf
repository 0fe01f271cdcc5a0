# The key, unless one is given. Its policy leaves all to IAM: modules/policies says who may use it.

locals {
  makes_key = var.encryption == "kms" && var.kms_key == null
  # Empty for SSE-S3.
  key_arn = local.makes_key ? aws_kms_key.this[0].arn : var.kms_key == null ? "" : var.kms_key.arn
}

resource "aws_kms_key" "this" {
  count = local.makes_key ? 1 : 0

  description             = "Encoder cache in ${var.bucket_name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  tags                    = var.tags

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "Account"
      Effect    = "Allow"
      Principal = { AWS = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root" }
      Action    = "kms:*"
      Resource  = "*"
    }]
  })
}

resource "aws_kms_alias" "this" {
  count = local.makes_key ? 1 : 0

  name          = "alias/ec-s3-${var.bucket_name}"
  target_key_id = aws_kms_key.this[0].key_id
}
