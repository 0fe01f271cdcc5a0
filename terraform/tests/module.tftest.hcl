# The root module against a provider that is made up: `terraform init && terraform test`.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { region = "eu-west-1", arn = "arn:aws:s3:::encoder-cache" }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-west-1:123456789012:key/0a1b" }
  }
  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/made-up" }
  }
}

variables {
  bucket_name = "encoder-cache"
}

run "defaults_are_private_encrypted_and_bounded" {
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this.block_public_acls,
      aws_s3_bucket_public_access_block.this.block_public_policy,
      aws_s3_bucket_public_access_block.this.ignore_public_acls,
      aws_s3_bucket_public_access_block.this.restrict_public_buckets,
    ])
    error_message = "The bucket could become public."
  }

  assert {
    condition     = one(aws_s3_bucket_ownership_controls.this.rule).object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs are on."
  }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this.rule).bucket_key_enabled
    error_message = "Each object costs a call to KMS."
  }

  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).kms_master_key_id == aws_kms_key.this[0].arn
    error_message = "The bucket does not encrypt with the key that was made."
  }

  assert {
    condition     = aws_kms_key.this[0].enable_key_rotation
    error_message = "The key does not rotate."
  }

  assert {
    condition = jsondecode(aws_kms_key.this[0].policy).Statement == [{
      Sid       = "Account"
      Effect    = "Allow"
      Principal = { AWS = "arn:aws:iam::123456789012:root" }
      Action    = "kms:*"
      Resource  = "*"
    }]
    error_message = "The key is not left to the account's IAM."
  }

  assert {
    condition = alltrue([
      for role, policy in aws_iam_policy.this : policy.policy == module.policies.role_policies[role]
    ])
    error_message = "A role has another's policy."
  }

  assert {
    condition     = aws_s3_bucket_policy.this.policy == module.policies.bucket_policy
    error_message = "The bucket lacks its policy."
  }

  assert {
    condition = (
      one(aws_s3_bucket_lifecycle_configuration.this.rule[0].expiration).days == 30 &&
      one(one(aws_s3_bucket_lifecycle_configuration.this.rule[0].filter).and).prefix == "ec/v1/" &&
      one(one(aws_s3_bucket_lifecycle_configuration.this.rule[0].filter).and).object_size_greater_than == 4095 &&
      aws_s3_bucket_lifecycle_configuration.this.rule[0].status == "Enabled"
    )
    error_message = "Items do not expire, or the kill switch does."
  }

  assert {
    condition = (
      one(aws_s3_bucket_lifecycle_configuration.this.rule[1].abort_incomplete_multipart_upload).days_after_initiation == 1 &&
      aws_s3_bucket_lifecycle_configuration.this.rule[1].status == "Enabled"
    )
    error_message = "Unfinished uploads stay."
  }

  assert {
    condition     = output.environment.writer == { EC_S3_URL = "s3://encoder-cache/ec?region=eu-west-1", EC_S3_OBJECT_LIFETIME = "30d" }
    error_message = "What servers are given is not what was made."
  }

  assert {
    condition     = keys(output.environment.reader) == ["EC_S3_URL"]
    error_message = "A reader cannot write items again before they expire."
  }

  assert {
    condition     = join(" ", keys(output.policy_arns)) == "maintainer prewarm reader writer"
    error_message = "A role has no policy."
  }

  assert {
    condition     = strcontains(aws_iam_policy.this["reader"].policy, "kms:Decrypt")
    error_message = "A reader cannot decrypt."
  }

  assert {
    condition     = length(aws_vpc_endpoint.this) + length(aws_cloudwatch_metric_alarm.this) + length(aws_s3_bucket_logging.this) == 0
    error_message = "Something that costs or cuts off is made unasked."
  }
}

run "sse_s3_needs_no_key" {
  variables {
    encryption = "s3"
  }

  assert {
    condition     = length(aws_kms_key.this) == 0 && output.kms_key_arn == ""
    error_message = "A key is made for SSE-S3."
  }

  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "The bucket does not use SSE-S3."
  }

  assert {
    condition     = !strcontains(aws_iam_policy.this["writer"].policy, "kms:")
    error_message = "A right to a key that is not there."
  }
}

run "a_given_key_is_used" {
  variables {
    kms_key = { arn = "arn:aws:kms:eu-west-1:123456789012:key/given" }
  }

  assert {
    condition     = length(aws_kms_key.this) == 0 && output.kms_key_arn == "arn:aws:kms:eu-west-1:123456789012:key/given"
    error_message = "A second key is made."
  }
}

run "everything_optional" {
  variables {
    further_prefixes = { "team-b" = 7 }
    access_log       = { bucket = "access-logs" }
    request_metrics  = true
    alarm_topic_arns = ["arn:aws:sns:eu-west-1:123456789012:alarms"]
    roles            = ["writer"]
    tagged           = true
    gateway_endpoint = {
      vpc_id          = "vpc-1"
      route_table_ids = ["rtb-1"]
    }
  }

  assert {
    condition = (
      one(one(aws_s3_bucket_lifecycle_configuration.this.rule[1].filter).and).prefix == "team-b/v1/" &&
      one(aws_s3_bucket_lifecycle_configuration.this.rule[1].expiration).days == 7 &&
      one(aws_s3_bucket_lifecycle_configuration.this.rule[2].abort_incomplete_multipart_upload).days_after_initiation == 1
    )
    error_message = "A further prefix does not expire by its own age."
  }

  assert {
    condition     = aws_vpc_endpoint.this[0].service_name == "com.amazonaws.eu-west-1.s3" && aws_vpc_endpoint.this[0].policy == module.policies.endpoint_policy
    error_message = "The endpoint is another service's, or open."
  }

  assert {
    condition     = length(aws_cloudwatch_metric_alarm.this) == 3 && aws_cloudwatch_metric_alarm.this["slow"].extended_statistic == "p99"
    error_message = "An alarm is missing."
  }

  assert {
    condition     = one(aws_s3_bucket_metric.this[0].filter).prefix == "ec/"
    error_message = "Metrics are not of the cache."
  }

  assert {
    condition     = aws_s3_bucket_logging.this[0].target_bucket == "access-logs"
    error_message = "No access logs."
  }

  assert {
    condition     = keys(output.policy_arns) == ["writer"] && strcontains(aws_iam_policy.this["writer"].policy, "s3:PutObjectTagging")
    error_message = "Not the policies that were asked for."
  }
}

run "a_bucket_name_with_dots_is_refused" {
  command = plan
  variables {
    bucket_name = "encoder.cache"
  }
  expect_failures = [var.bucket_name]
}

run "a_pattern_in_the_prefix_is_refused" {
  command = plan
  variables {
    prefix = "team/*"
  }
  expect_failures = [var.prefix]
}

run "half_a_day_is_refused" {
  command = plan
  variables {
    expire_days = 0.5
  }
  expect_failures = [var.expire_days]
}

run "a_prefix_named_twice_is_refused" {
  command = plan
  variables {
    further_prefixes = { ec = 7 }
  }
  expect_failures = [var.further_prefixes]
}

run "a_tenant_within_the_prefix_is_refused" {
  command = plan
  variables {
    further_prefixes = { "ec/team-b" = 7 }
  }
  expect_failures = [var.further_prefixes]
}

run "a_prefix_within_a_tenants_is_refused" {
  command = plan
  variables {
    prefix           = "team/a"
    further_prefixes = { team = 7 }
  }
  expect_failures = [var.further_prefixes]
}

run "tenants_within_one_another_are_refused" {
  command = plan
  variables {
    further_prefixes = { team = 7, "team/b" = 7 }
  }
  expect_failures = [var.further_prefixes]
}

run "tenants_in_a_bucket_that_is_all_the_caches_are_refused" {
  command = plan
  variables {
    prefix           = ""
    further_prefixes = { team-b = 7 }
  }
  expect_failures = [var.further_prefixes]
}

run "an_unknown_encryption_is_refused" {
  command = plan
  variables {
    encryption = "none"
  }
  expect_failures = [var.encryption]
}

run "a_key_for_sse_s3_is_refused" {
  command = plan
  variables {
    encryption = "s3"
    kms_key    = { arn = "arn:aws:kms:eu-west-1:123456789012:key/given" }
  }
  expect_failures = [var.kms_key]
}

run "a_pattern_of_keys_is_refused" {
  command = plan
  variables {
    kms_key = { arn = "arn:aws:kms:eu-west-1:*:key/0a1b" }
  }
  expect_failures = [var.kms_key]
}

run "a_key_by_alias_is_refused" {
  command = plan
  variables {
    kms_key = { arn = "alias/cache" }
  }
  expect_failures = [var.kms_key]
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

run "alarms_without_metrics_are_refused" {
  command = plan
  variables {
    alarm_topic_arns = ["arn:aws:sns:eu-west-1:123456789012:alarms"]
  }
  expect_failures = [var.alarm_topic_arns]
}

run "a_bucket_that_logs_into_itself_is_refused" {
  command = plan
  variables {
    access_log = { bucket = "encoder-cache" }
  }
  expect_failures = [var.access_log]
}

run "what_it_is_given_may_come_from_the_same_configuration" {
  command = plan

  module {
    source = "./tests/same-configuration"
  }

  assert {
    condition     = join(" ", output.roles) == "maintainer prewarm reader writer"
    error_message = "Not planned in one go."
  }
}
