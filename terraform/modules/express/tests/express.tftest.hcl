mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_region" {
    defaults = { id = "us-east-1", name = "us-east-1" }
  }
  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/made-up" }
  }
}

variables {
  bucket_name = "encoder-cache"
  zone_id     = "use1-az4"
}

run "rights_are_sessions_and_a_reader_only_reads" {
  assert {
    condition = {
      for role, text in output.policy_documents : role => jsondecode(text).Statement[0].Condition.StringEquals["s3express:SessionMode"]
      } == {
      reader     = ["ReadOnly"]
      writer     = ["ReadWrite"]
      prewarm    = ["ReadWrite"]
      maintainer = ["ReadWrite"]
    }
    error_message = "A role may open another session than it needs."
  }

  assert {
    condition = alltrue([
      for role, text in output.policy_documents :
      jsondecode(text).Statement == [{
        Sid       = "Session"
        Effect    = "Allow"
        Action    = ["s3express:CreateSession"]
        Resource  = "arn:aws:s3express:us-east-1:123456789012:bucket/encoder-cache--use1-az4--x-s3"
        Condition = { StringEquals = { "s3express:SessionMode" = [role == "reader" ? "ReadOnly" : "ReadWrite"] } }
      }]
    ])
    error_message = "A right is not that to a session of this bucket."
  }

  assert {
    condition     = output.cache_url == "s3://encoder-cache--use1-az4--x-s3/ec?region=us-east-1"
    error_message = "URL is ${output.cache_url}."
  }
}

run "the_bucket_refuses_plain_http_and_old_tls_and_lets_rules_delete" {
  assert {
    condition = jsondecode(aws_s3_bucket_policy.this.policy).Statement == [
      {
        Sid       = "DenyPlainHttp"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3express:*"
        Resource  = ["arn:aws:s3express:us-east-1:123456789012:bucket/encoder-cache--use1-az4--x-s3"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        Sid       = "DenyOldTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3express:*"
        Resource  = ["arn:aws:s3express:us-east-1:123456789012:bucket/encoder-cache--use1-az4--x-s3"]
        Condition = { NumericLessThan = { "s3express:TlsVersion" = "1.2" } }
      },
      {
        Sid       = "Expire"
        Effect    = "Allow"
        Principal = { Service = "lifecycle.s3.amazonaws.com" }
        Action    = "s3express:CreateSession"
        Resource  = ["arn:aws:s3express:us-east-1:123456789012:bucket/encoder-cache--use1-az4--x-s3"]
        Condition = { StringEquals = { "s3express:SessionMode" = "ReadWrite" } }
      },
    ]
    error_message = "The bucket's policy changed."
  }

  assert {
    condition = (
      one(aws_s3_bucket_lifecycle_configuration.this.rule[0].expiration).days == 7 &&
      one(one(aws_s3_bucket_lifecycle_configuration.this.rule[0].filter).and).prefix == "ec/v1/" &&
      one(one(aws_s3_bucket_lifecycle_configuration.this.rule[0].filter).and).object_size_greater_than == 4095
    )
    error_message = "Items do not expire, or the kill switch does."
  }

  assert {
    condition     = one(aws_s3_bucket_lifecycle_configuration.this.rule[1].abort_incomplete_multipart_upload).days_after_initiation == 1
    error_message = "Unfinished uploads stay."
  }
}

run "its_endpoint_is_another_service" {
  variables {
    gateway_endpoint = {
      vpc_id          = "vpc-1"
      route_table_ids = ["rtb-1"]
    }
  }

  assert {
    condition     = aws_vpc_endpoint.this[0].service_name == "com.amazonaws.us-east-1.s3express"
    error_message = "The endpoint is that of S3."
  }

  assert {
    condition = jsondecode(aws_vpc_endpoint.this[0].policy).Statement == [{
      Sid       = "Cache"
      Effect    = "Allow"
      Principal = "*"
      Action    = ["s3express:CreateSession"]
      Resource  = ["arn:aws:s3express:us-east-1:123456789012:bucket/encoder-cache--use1-az4--x-s3"]
      Condition = { StringEquals = { "aws:PrincipalAccount" = "123456789012" } }
    }]
    error_message = "Other accounts or other buckets may use the endpoint."
  }
}

run "a_zone_by_name_is_refused" {
  command = plan
  variables {
    zone_id = "us-east-1a"
  }
  expect_failures = [var.zone_id]
}

run "a_whole_name_is_refused" {
  command = plan
  variables {
    bucket_name = "cache--use1-az4--x-s3"
  }
  expect_failures = [var.bucket_name]
}

run "half_a_day_is_refused" {
  command = plan
  variables {
    expire_days = 0.5
  }
  expect_failures = [var.expire_days]
}

run "an_unknown_role_is_refused" {
  command = plan
  variables {
    roles = ["owner"]
  }
  expect_failures = [var.roles]
}

run "an_endpoint_that_nothing_uses_is_refused" {
  command = plan
  variables {
    gateway_endpoint = {
      vpc_id          = "vpc-1"
      route_table_ids = []
    }
  }
  expect_failures = [var.gateway_endpoint]
}
