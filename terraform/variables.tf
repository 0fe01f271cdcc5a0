variable "bucket_name" {
  description = "Name of the bucket to make."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name: must be 3 to 63 lower-case letters, digits and hyphens, and begin and end with a letter or digit (dots break TLS to AWS); choose another name."
  }

  validation {
    condition     = !endswith(var.bucket_name, "--x-s3")
    error_message = "bucket_name: names a directory bucket; use modules/express for S3 Express One Zone."
  }
}

variable "prefix" {
  description = "Prefix of the cache in the bucket; empty for the whole bucket."
  type        = string
  default     = "ec"
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9_=-][A-Za-z0-9_=.-]*(/[A-Za-z0-9_=-][A-Za-z0-9_=.-]*)*)?$", var.prefix))
    error_message = "prefix: must look like \"team/cache\": no slash at either end, and only letters, digits and _ = . - in between (a policy reads others as wildcards); rename it."
  }
}

variable "expire_days" {
  description = "Age in days at which items expire. S3 counts from an item's writing, not from its last use."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.expire_days >= 1 && floor(var.expire_days) == var.expire_days
    error_message = "expire_days: must be a whole number of days, 1 or more; S3 knows no shorter age."
  }
}

variable "further_prefixes" {
  description = "Other prefixes of the bucket (other tenants), and the age in days at which their items expire."
  type        = map(number)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for days in values(var.further_prefixes) : days >= 1 && floor(days) == days])
    error_message = "further_prefixes: each age must be a whole number of days, 1 or more."
  }

  validation {
    condition     = alltrue([for prefix in keys(var.further_prefixes) : can(regex("^[A-Za-z0-9_=-][A-Za-z0-9_=.-]*(/[A-Za-z0-9_=-][A-Za-z0-9_=.-]*)*$", prefix))])
    error_message = "further_prefixes: each must look like \"team/cache\", without a slash at either end."
  }

  validation {
    condition     = !contains(keys(var.further_prefixes), var.prefix)
    error_message = "further_prefixes: names `prefix` once more; its age is `expire_days`."
  }

  validation {
    condition = length(var.further_prefixes) == 0 || (var.prefix != "" && alltrue([
      for pair in setproduct(
        concat([var.prefix], keys(var.further_prefixes)),
        concat([var.prefix], keys(var.further_prefixes)),
      ) : pair[0] == pair[1] || !startswith(pair[1], "${pair[0]}/")
    ]))
    error_message = "further_prefixes: none must lie within another or `prefix`, or around it, as the rights to the outer one are rights to the inner one; put them side by side."
  }
}

variable "encryption" {
  description = "How the bucket encrypts: `kms` (SSE-KMS with a bucket key) or `s3` (SSE-S3)."
  type        = string
  default     = "kms"
  nullable    = false

  validation {
    condition     = contains(["kms", "s3"], var.encryption)
    error_message = "encryption: must be \"kms\" (a key of yours, about 1 USD a month) or \"s3\" (a key of AWS, free)."
  }
}

variable "kms_key" {
  description = "An existing KMS key; without it, one is made where `encryption` is `kms`. (An object, so that the ARN may come from the same configuration.)"
  type        = object({ arn = string })
  default     = null

  validation {
    condition     = var.kms_key == null || try(can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.kms_key.arn)), false)
    error_message = "kms_key: arn must be one key's ARN (arn:aws:kms:REGION:ACCOUNT:key/ID); a policy cannot name a key by its alias or its bare ID, and a pattern would let others in."
  }

  validation {
    condition     = var.kms_key == null || var.encryption == "kms"
    error_message = "kms_key: is given, but encryption is \"s3\"; set encryption = \"kms\" or leave the key out."
  }
}

variable "force_destroy" {
  description = "Whether `terraform destroy` may remove a bucket that is not empty. Items can be made anew."
  type        = bool
  default     = false
  nullable    = false
}

variable "roles" {
  description = "Roles to make a managed policy for: reader, writer, prewarm, maintainer."
  type        = set(string)
  default     = ["reader", "writer", "prewarm", "maintainer"]
  nullable    = false

  validation {
    condition     = length(setsubtract(var.roles, ["reader", "writer", "prewarm", "maintainer"])) == 0
    error_message = "roles: knows reader, writer, prewarm and maintainer; docs/how-to/permissions.md says which is which."
  }
}

variable "tagged" {
  description = "Whether servers tag what they store (setting `tags` of ec_s3), which is a right of its own."
  type        = bool
  default     = false
  nullable    = false
}

variable "gateway_endpoint" {
  description = "Makes a gateway endpoint, so that traffic to S3 passes no NAT gateway. It serves all of S3 for its route tables: name buckets that pods need beside this one (images of ECR lie in prod-REGION-starport-layer-bucket) in `readable_buckets`."
  type = object({
    vpc_id           = string
    route_table_ids  = set(string)
    readable_buckets = optional(set(string), [])
  })
  default = null

  validation {
    condition     = var.gateway_endpoint == null || try(length(var.gateway_endpoint.route_table_ids) > 0, false)
    error_message = "gateway_endpoint: route_table_ids is empty, so nothing would use the endpoint; name the private route tables."
  }
}

variable "request_metrics" {
  description = "Whether S3 reports request metrics of the cache to CloudWatch, with alarms on them (charged as custom metrics)."
  type        = bool
  default     = false
  nullable    = false
}

variable "alarm_topic_arns" {
  description = "SNS topics that the alarms notify."
  type        = set(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.alarm_topic_arns) == 0 || var.request_metrics
    error_message = "alarm_topic_arns: alarms need the metrics that they watch; set request_metrics = true."
  }

  validation {
    condition     = alltrue([for arn in var.alarm_topic_arns : can(regex("^arn:[a-z-]+:sns:", arn))])
    error_message = "alarm_topic_arns: must be ARNs of SNS topics (arn:aws:sns:REGION:ACCOUNT:NAME)."
  }
}

variable "access_log" {
  description = "An existing bucket for server access logs, which name items and who read them; without it there are none. (An object, so that the bucket may come from the same configuration.)"
  type        = object({ bucket = string })
  default     = null

  validation {
    condition     = var.access_log == null || try(var.access_log.bucket != var.bucket_name, false)
    error_message = "access_log: a bucket that logs into itself never stops growing; name another one."
  }
}

variable "tags" {
  description = "Tags of everything that this module makes."
  type        = map(string)
  default     = {}
  nullable    = false
}
