# What each role may do, as JSON: no provider, so that all of it is tested offline.
# The same rights as `ec-s3 policy` prints; a test compares the two, action by action.

locals {
  bucket_arn  = "arn:${var.partition}:s3:::${var.bucket}"
  below       = var.prefix == "" ? "" : "${var.prefix}/"
  objects_arn = "${local.bucket_arn}/${local.below}*"
  aws_suffix  = var.partition == "aws-cn" ? "amazonaws.com.cn" : "amazonaws.com"

  # Rights to objects below the prefix.
  object_actions = {
    reader     = ["s3:GetObject"]
    writer     = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"]
    prewarm    = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"]
    maintainer = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:ListMultipartUploadParts", "s3:PutObject"]
  }
  # Asked of whoever stores an object that brings tags along.
  tag_actions = {
    reader     = []
    writer     = ["s3:PutObjectTagging"]
    prewarm    = ["s3:PutObjectTagging"]
    maintainer = ["s3:PutObjectTagging"]
  }
  # Everybody lists: without the right, S3 answers 403 for an object that is not there.
  list_actions = {
    reader     = ["s3:ListBucket"]
    writer     = ["s3:ListBucket"]
    prewarm    = ["s3:ListBucket"]
    maintainer = ["s3:ListBucket"]
  }
  # Apart from the listing, as no condition on a prefix exists for it.
  upload_actions = {
    reader     = []
    writer     = []
    prewarm    = []
    maintainer = ["s3:ListBucketMultipartUploads"]
  }
  key_actions = {
    reader     = ["kms:Decrypt"]
    writer     = ["kms:Decrypt", "kms:GenerateDataKey"]
    prewarm    = ["kms:Decrypt", "kms:GenerateDataKey"]
    maintainer = ["kms:Decrypt", "kms:GenerateDataKey"]
  }

  # A statement without actions or not asked for is left out.
  role_statements = {
    for role in keys(local.object_actions) : role => concat(
      [{
        Sid      = "Objects"
        Effect   = "Allow"
        Action   = sort(concat(local.object_actions[role], var.tagged ? local.tag_actions[role] : []))
        Resource = local.objects_arn
      }],
      [merge(
        {
          Sid      = "List"
          Effect   = "Allow"
          Action   = local.list_actions[role]
          Resource = local.bucket_arn
        },
        var.prefix == "" ? {} : { Condition = { StringLike = { "s3:prefix" = ["${var.prefix}/*"] } } },
      )],
      [for actions in [local.upload_actions[role]] : {
        Sid      = "ListUploads"
        Effect   = "Allow"
        Action   = actions
        Resource = local.bucket_arn
      } if length(actions) > 0],
      [for key in [var.key_arn] : {
        Sid       = "Key"
        Effect    = "Allow"
        Action    = local.key_actions[role]
        Resource  = key
        Condition = { StringLike = { "kms:ViaService" = "s3.*.${local.aws_suffix}" } }
      } if key != ""],
    )
  }

  # What nobody may do, whatever rights he has.
  deny_statements = [
    {
      Sid       = "DenyPlainHttp"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    },
    {
      Sid       = "DenyOldTls"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
      Condition = { NumericLessThan = { "s3:TlsVersion" = "1.2" } }
    },
    {
      Sid       = "DenyCustomerKeys" # no other server could read such an object
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:PutObject"
      Resource  = ["${local.bucket_arn}/*"]
      Condition = { Null = { "s3:x-amz-server-side-encryption-customer-algorithm" = "false" } }
    },
  ]

  every_action = sort(distinct(flatten([
    values(local.object_actions), values(local.tag_actions),
    values(local.list_actions), values(local.upload_actions),
  ])))

  # An endpoint serves all of S3 for its route tables: what is not named here is cut off there.
  endpoint_statements = concat(
    [{
      Sid       = "Cache"
      Effect    = "Allow"
      Principal = "*"
      Action    = local.every_action
      Resource  = [local.bucket_arn, "${local.bucket_arn}/*"]
      Condition = { StringEquals = { "aws:PrincipalAccount" = var.account_id } }
    }],
    [for buckets in [sort(var.readable_buckets)] : {
      Sid       = "Read"
      Effect    = "Allow"
      Principal = "*"
      Action    = ["s3:GetObject"]
      Resource  = [for bucket in buckets : "arn:${var.partition}:s3:::${bucket}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "true" } }
    } if length(buckets) > 0],
  )

  url_arguments = compact([
    var.endpoint == "" ? "" : "endpoint=${var.endpoint}",
    var.region == "" ? "" : "region=${var.region}",
  ])
  url = trimsuffix("s3://${var.bucket}/${var.prefix}", "/")
}
