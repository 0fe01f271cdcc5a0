# Runs without a provider and without a network: `terraform init && terraform test`.

variables {
  bucket     = "encoder-cache"
  prefix     = "team/cache"
  region     = "eu-west-1"
  account_id = "123456789012"
}

run "each_role_gets_its_actions_and_no_more" {
  command = plan

  assert {
    condition = jsonencode({
      for role, text in output.role_policies :
      role => sort(flatten([for statement in jsondecode(text).Statement : statement.Action]))
      }) == jsonencode({
      reader     = ["s3:GetObject", "s3:ListBucket"]
      writer     = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:ListBucket", "s3:PutObject"]
      prewarm    = ["s3:AbortMultipartUpload", "s3:GetObject", "s3:ListBucket", "s3:PutObject"]
      maintainer = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts", "s3:PutObject"]
    })
    error_message = "A role's actions changed: change ec_s3/permissions.py as well."
  }

  assert {
    condition = alltrue(flatten([
      for text in values(output.role_policies) : [
        for statement in jsondecode(text).Statement :
        contains(["arn:aws:s3:::encoder-cache", "arn:aws:s3:::encoder-cache/team/cache/*"], statement.Resource)
      ]
    ]))
    error_message = "A right reaches beyond the bucket and the prefix."
  }

  assert {
    condition = alltrue([
      for text in values(output.role_policies) :
      jsondecode(text).Statement[1].Condition.StringLike["s3:prefix"] == ["team/cache/*"]
    ])
    error_message = "Listing reaches beyond the prefix."
  }
}

run "the_bucket_refuses_plain_http_old_tls_and_customers_keys" {
  command = plan

  assert {
    condition = [
      for statement in jsondecode(output.bucket_policy).Statement : [statement.Sid, statement.Effect, statement.Principal, jsonencode(statement.Condition)]
      ] == [
      ["DenyPlainHttp", "Deny", "*", jsonencode({ Bool = { "aws:SecureTransport" = "false" } })],
      ["DenyOldTls", "Deny", "*", jsonencode({ NumericLessThan = { "s3:TlsVersion" = "1.2" } })],
      ["DenyCustomerKeys", "Deny", "*", jsonencode({ Null = { "s3:x-amz-server-side-encryption-customer-algorithm" = "false" } })],
    ]
    error_message = "The bucket's policy changed: change ec_s3/permissions.py as well."
  }
}

run "a_key_may_be_used_through_s3_alone" {
  command = plan

  variables {
    key_arn = "arn:aws:kms:eu-west-1:123456789012:key/0a1b"
  }

  assert {
    condition = {
      for role, text in output.role_policies : role => reverse(jsondecode(text).Statement)[0].Action
      } == {
      reader     = ["kms:Decrypt"]
      writer     = ["kms:Decrypt", "kms:GenerateDataKey"]
      prewarm    = ["kms:Decrypt", "kms:GenerateDataKey"]
      maintainer = ["kms:Decrypt", "kms:GenerateDataKey"]
    }
    error_message = "A role's rights to the key changed: change ec_s3/permissions.py as well."
  }

  assert {
    condition = alltrue([
      for text in values(output.role_policies) :
      reverse(jsondecode(text).Statement)[0].Condition == { StringLike = { "kms:ViaService" = "s3.*.amazonaws.com" } }
    ])
    error_message = "The key may be used past S3."
  }
}

run "the_widest_role_is_allowed_exactly_this" {
  command = plan

  variables {
    tagged  = true
    key_arn = "arn:aws:kms:eu-west-1:123456789012:key/0a1b"
  }

  assert {
    condition = jsondecode(output.role_policies.maintainer).Statement == [
      {
        Sid      = "Objects"
        Effect   = "Allow"
        Action   = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:ListMultipartUploadParts", "s3:PutObject", "s3:PutObjectTagging"]
        Resource = "arn:aws:s3:::encoder-cache/team/cache/*"
      },
      {
        Sid       = "List"
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = "arn:aws:s3:::encoder-cache"
        Condition = { StringLike = { "s3:prefix" = ["team/cache/*"] } }
      },
      {
        Sid      = "ListUploads"
        Effect   = "Allow"
        Action   = ["s3:ListBucketMultipartUploads"]
        Resource = "arn:aws:s3:::encoder-cache"
      },
      {
        Sid       = "Key"
        Effect    = "Allow"
        Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource  = "arn:aws:kms:eu-west-1:123456789012:key/0a1b"
        Condition = { StringLike = { "kms:ViaService" = "s3.*.amazonaws.com" } }
      },
    ]
    error_message = "A maintainer's policy changed: change ec_s3/permissions.py as well."
  }
}

run "without_a_prefix_the_whole_bucket_is_meant" {
  command = plan

  variables {
    prefix = ""
    region = ""
  }

  assert {
    condition     = jsondecode(output.role_policies.reader).Statement[0].Resource == "arn:aws:s3:::encoder-cache/*"
    error_message = "Objects of the whole bucket are not readable."
  }

  assert {
    condition     = !can(jsondecode(output.role_policies.reader).Statement[1].Condition)
    error_message = "Listing the whole bucket is limited to a prefix."
  }

  assert {
    condition     = output.cache_url == "s3://encoder-cache" && output.items_prefix == "v1/"
    error_message = "URL or items' prefix is wrong without a prefix."
  }
}

run "the_url_names_region_and_endpoint" {
  command = plan

  variables {
    endpoint = "https://minio.example:9000"
  }

  assert {
    condition     = output.cache_url == "s3://encoder-cache/team/cache?endpoint=https://minio.example:9000&region=eu-west-1"
    error_message = "URL is ${output.cache_url}."
  }
}

run "an_endpoint_serves_the_account_and_what_is_named" {
  command = plan

  variables {
    readable_buckets = ["prod-eu-west-1-starport-layer-bucket", "a.b-c", "ab.c"]
  }

  assert {
    condition = jsondecode(output.endpoint_policy).Statement == [
      {
        Sid       = "Cache"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts", "s3:PutObject", "s3:PutObjectTagging"]
        Resource  = ["arn:aws:s3:::encoder-cache", "arn:aws:s3:::encoder-cache/*"]
        Condition = { StringEquals = { "aws:PrincipalAccount" = "123456789012" } }
      },
      {
        Sid       = "Read"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject"]
        Resource  = ["arn:aws:s3:::a.b-c/*", "arn:aws:s3:::ab.c/*", "arn:aws:s3:::prod-eu-west-1-starport-layer-bucket/*"]
        Condition = { Bool = { "aws:SecureTransport" = "true" } }
      },
    ]
    error_message = "The endpoint's policy changed."
  }
}

run "a_prefix_that_a_policy_reads_as_a_pattern_is_refused" {
  command = plan

  variables {
    prefix = "team/*"
  }

  expect_failures = [var.prefix]
}

run "a_directory_bucket_is_refused" {
  command = plan

  variables {
    bucket = "cache--use1-az4--x-s3"
  }

  expect_failures = [var.bucket]
}

run "a_key_by_alias_is_refused" {
  command = plan

  variables {
    key_arn = "arn:aws:kms:eu-west-1:123456789012:alias/cache"
  }

  expect_failures = [var.key_arn]
}

run "a_pattern_of_keys_is_refused" {
  command = plan

  variables {
    key_arn = "arn:aws:kms:eu-west-1:123456789012:key/*"
  }

  expect_failures = [var.key_arn]
}

run "a_pattern_of_readable_buckets_is_refused" {
  command = plan

  variables {
    readable_buckets = ["prod-*"]
  }

  expect_failures = [var.readable_buckets]
}

run "an_unknown_partition_is_refused" {
  command = plan

  variables {
    partition = "moon"
  }

  expect_failures = [var.partition]
}

run "credentials_in_an_endpoint_are_refused" {
  command = plan

  variables {
    endpoint = "https://user:secret@minio.example"
  }

  expect_failures = [var.endpoint]
}
