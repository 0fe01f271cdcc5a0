variable "bucket" {
  description = "Name of the bucket."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "bucket: must be 3 to 63 lower-case letters, digits, dots and hyphens, and begin and end with a letter or digit; choose another name."
  }

  validation {
    condition     = !endswith(var.bucket, "--x-s3")
    error_message = "bucket: a directory bucket knows no rights to objects; use modules/express for it."
  }
}

variable "prefix" {
  description = "Prefix of the cache in the bucket, as in EC_S3_URL; empty for the whole bucket."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9_=-][A-Za-z0-9_=.-]*(/[A-Za-z0-9_=-][A-Za-z0-9_=.-]*)*)?$", var.prefix))
    error_message = "prefix: must look like \"team/cache\": no slash at either end, and only letters, digits and _ = . - in between (a policy reads others as wildcards); rename it."
  }
}

variable "partition" {
  description = "Part of AWS: aws, aws-cn or aws-us-gov."
  type        = string
  default     = "aws"
  nullable    = false

  validation {
    condition     = contains(["aws", "aws-cn", "aws-us-gov"], var.partition)
    error_message = "partition: must be aws, aws-cn or aws-us-gov; take it from data.aws_partition."
  }
}

variable "tagged" {
  description = "Whether servers tag what they store (setting `tags` of ec_s3)."
  type        = bool
  default     = false
  nullable    = false
}

variable "key_arn" {
  description = "ARN of the KMS key that the bucket encrypts with by default; empty for none."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.key_arn == "" || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.key_arn))
    error_message = "key_arn: must be one key's ARN (arn:aws:kms:REGION:ACCOUNT:key/ID); a policy cannot name a key by its alias or its bare ID, and a pattern would let others in."
  }
}

variable "account_id" {
  description = "Account whose principals may use a gateway endpoint; only needed for `endpoint_policy`."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.account_id == "" || can(regex("^[0-9]{12}$", var.account_id))
    error_message = "account_id: must be 12 digits; take it from data.aws_caller_identity."
  }
}

variable "readable_buckets" {
  description = "Names of further buckets that anybody may read through a gateway endpoint."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for bucket in var.readable_buckets : can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", bucket))])
    error_message = "readable_buckets: must be names of buckets, not ARNs or patterns (prod-eu-west-1-starport-layer-bucket has ECR's layers in that region)."
  }
}

variable "region" {
  description = "Region of the bucket, for `cache_url`; empty leaves it out."
  type        = string
  default     = ""
  nullable    = false
}

variable "endpoint" {
  description = "URL of an S3 server other than AWS, for `cache_url`; empty leaves it out."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.endpoint == "" || can(regex("^https?://[^/?#&@]+$", var.endpoint))
    error_message = "endpoint: must be http(s)://host[:port] without a path or credentials; credentials come from the AWS chain."
  }
}
