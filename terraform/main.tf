# The bucket: private, encrypted, TLS only, and bounded in size by expiry.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

module "policies" {
  source = "./modules/policies"

  bucket           = var.bucket_name
  prefix           = var.prefix
  partition        = data.aws_partition.current.partition
  tagged           = var.tagged
  key_arn          = local.key_arn
  account_id       = data.aws_caller_identity.current.account_id
  readable_buckets = var.gateway_endpoint == null ? [] : var.gateway_endpoint.readable_buckets
  region           = aws_s3_bucket.this.region
}

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_21:Items are immutable and named by their content; old versions would only cost
  #checkov:skip=CKV_AWS_144:Items can be made anew from their media, so a second region buys nothing
  #checkov:skip=CKV2_AWS_62:Nobody consumes event notifications of a cache
  #checkov:skip=CKV_AWS_18:Optional, variable access_log; logs of a cache can outgrow it
  bucket        = var.bucket_name
  force_destroy = var.force_destroy
  tags          = var.tags

  # Destroyed before the key: a bucket that is not empty stays, and its items stay readable.
  depends_on = [aws_kms_key.this]
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket = aws_s3_bucket.this.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced" # switches ACLs off
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    bucket_key_enabled = var.encryption == "kms" # one call to KMS for many objects

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.encryption == "kms" ? "aws:kms" : "AES256"
      kms_master_key_id = var.encryption == "kms" ? local.key_arn : null
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = module.policies.bucket_policy

  # S3 answers "conflicting conditional operation" to two changes of a bucket's access at once.
  depends_on = [
    aws_s3_bucket_public_access_block.this,
    aws_s3_bucket_ownership_controls.this,
  ]
}

locals {
  # Smaller objects stay: a namespace's description and its kill switch.
  spared_bytes = 4096
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "ec-s3-items"
    status = "Enabled"

    filter {
      and {
        prefix                   = module.policies.items_prefix
        object_size_greater_than = local.spared_bytes - 1
      }
    }

    expiration {
      days = var.expire_days
    }
  }

  dynamic "rule" {
    for_each = var.further_prefixes

    content {
      id     = "ec-s3-items-${rule.key}"
      status = "Enabled"

      filter {
        and {
          prefix                   = "${rule.key}/v1/"
          object_size_greater_than = local.spared_bytes - 1
        }
      }

      expiration {
        days = rule.value
      }
    }
  }

  rule {
    id     = "ec-s3-unfinished-uploads"
    status = "Enabled"

    filter {} # the whole bucket: a part of an upload serves nobody

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}
