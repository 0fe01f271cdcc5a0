# A directory bucket in one zone. It always encrypts (SSE-S3 here), never has ACLs or versions, and is
# never public; its rights are those to open a session, for the whole bucket.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

data "aws_region" "current" {}

locals {
  name = "${var.bucket_name}--${var.zone_id}--x-s3"
  arn = join(":", [
    "arn", data.aws_partition.current.partition, "s3express", data.aws_region.current.id,
    data.aws_caller_identity.current.account_id, "bucket/${local.name}",
  ])
  below     = var.prefix == "" ? "" : "${var.prefix}/"
  cache_url = "${trimsuffix("s3://${local.name}/${var.prefix}", "/")}?region=${data.aws_region.current.id}"

  # S3 offers the most that is allowed; who may only read opens a session that only reads.
  session_modes = {
    reader     = ["ReadOnly"]
    writer     = ["ReadWrite"]
    prewarm    = ["ReadWrite"]
    maintainer = ["ReadWrite"]
  }
  role_statements = {
    for role, modes in local.session_modes : role => [{
      Sid       = "Session"
      Effect    = "Allow"
      Action    = ["s3express:CreateSession"]
      Resource  = local.arn
      Condition = { StringEquals = { "s3express:SessionMode" = modes } }
    }]
  }

  bucket_statements = [
    {
      Sid       = "DenyPlainHttp"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3express:*"
      Resource  = [local.arn]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    },
    {
      Sid       = "DenyOldTls"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3express:*"
      Resource  = [local.arn]
      Condition = { NumericLessThan = { "s3express:TlsVersion" = "1.2" } }
    },
    {
      Sid       = "Expire" # a lifecycle rule deletes through a session, too
      Effect    = "Allow"
      Principal = { Service = "lifecycle.s3.amazonaws.com" }
      Action    = "s3express:CreateSession"
      Resource  = [local.arn]
      Condition = { StringEquals = { "s3express:SessionMode" = "ReadWrite" } }
    },
  ]
}

resource "aws_s3_directory_bucket" "this" {
  bucket        = local.name
  force_destroy = var.force_destroy

  location {
    name = var.zone_id
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_directory_bucket.this.bucket
  policy = jsonencode({ Version = "2012-10-17", Statement = local.bucket_statements })
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_directory_bucket.this.bucket

  rule {
    id     = "ec-s3-items"
    status = "Enabled"

    filter {
      and {
        prefix                   = "${local.below}v1/"
        object_size_greater_than = 4095 # spares a namespace's description and its kill switch
      }
    }

    expiration {
      days = var.expire_days
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

  depends_on = [aws_s3_bucket_policy.this] # S3 refuses rules that it may not carry out
}

resource "aws_iam_policy" "this" {
  for_each = var.roles

  name        = "ec-s3-${local.name}-${each.key}"
  description = "Encoder cache in ${local.name}: ${each.key}"
  policy      = jsonencode({ Version = "2012-10-17", Statement = local.role_statements[each.key] })
  tags        = var.tags
}

resource "aws_vpc_endpoint" "this" {
  count = var.gateway_endpoint == null ? 0 : 1

  vpc_id            = var.gateway_endpoint.vpc_id
  service_name      = "com.amazonaws.${data.aws_region.current.id}.s3express"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.gateway_endpoint.route_table_ids
  tags              = merge({ Name = "ec-s3-${local.name}" }, var.tags)

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "Cache"
      Effect    = "Allow"
      Principal = "*"
      Action    = ["s3express:CreateSession"]
      Resource  = [local.arn]
      Condition = { StringEquals = { "aws:PrincipalAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}
