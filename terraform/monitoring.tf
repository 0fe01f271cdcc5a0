# Request metrics, alarms on them, and access logs: all optional.

resource "aws_s3_bucket_metric" "this" {
  count = var.request_metrics ? 1 : 0

  bucket = aws_s3_bucket.this.id
  name   = "ec-s3"

  dynamic "filter" {
    for_each = var.prefix == "" ? [] : [var.prefix]

    content {
      prefix = "${filter.value}/"
    }
  }
}

locals {
  # Average of an error metric is its share of the requests.
  alarms = {
    server-errors = {
      metric      = "5xxErrors"
      statistic   = "Average"
      percentile  = null
      threshold   = 0.01
      description = "More than 1 % of the requests to the cache fail at S3 (slow down, unavailable); servers encode instead."
    }
    refusals = {
      metric      = "4xxErrors"
      statistic   = "Average"
      percentile  = null
      threshold   = 0.98 # an ordinary miss is a 404
      description = "Hardly any request to the cache succeeds: rights, the KMS key, or a cold cache that nobody fills."
    }
    slow = {
      metric      = "FirstByteLatency"
      statistic   = null
      percentile  = "p99"
      threshold   = 1000 # milliseconds
      description = "S3 takes over a second to answer 1 % of the requests to the cache."
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "this" {
  for_each = var.request_metrics ? local.alarms : {}

  alarm_name          = "ec-s3-${var.bucket_name}-${each.key}"
  alarm_description   = each.value.description
  namespace           = "AWS/S3"
  metric_name         = each.value.metric
  statistic           = each.value.statistic
  extended_statistic  = each.value.percentile
  comparison_operator = "GreaterThanThreshold"
  threshold           = each.value.threshold
  period              = 300
  evaluation_periods  = 3
  treat_missing_data  = "notBreaching" # no requests, no trouble
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = var.tags

  dimensions = {
    BucketName = aws_s3_bucket.this.id
    FilterId   = aws_s3_bucket_metric.this[0].name
  }
}

resource "aws_s3_bucket_logging" "this" {
  count = var.access_log == null ? 0 : 1

  bucket        = aws_s3_bucket.this.id
  target_bucket = var.access_log.bucket
  target_prefix = "${var.bucket_name}/"
}
