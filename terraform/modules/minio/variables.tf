variable "bucket_name" {
  description = "Name of the bucket to make."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name: must be 3 to 63 lower-case letters, digits and hyphens, and begin and end with a letter or digit; choose another name."
  }
}

variable "endpoint" {
  description = "URL at which servers reach MinIO."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^https?://[^/?#&@]+$", var.endpoint))
    error_message = "endpoint: must be http(s)://host[:port] without a path or credentials; credentials come from the AWS chain."
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
  description = "Age in days at which items expire, counted from an item's writing, not from its last use."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = var.expire_days >= 1 && floor(var.expire_days) == var.expire_days
    error_message = "expire_days: must be a whole number of days, 1 or more."
  }
}

variable "force_destroy" {
  description = "Whether `terraform destroy` may remove a bucket that is not empty. Items can be made anew."
  type        = bool
  default     = false
  nullable    = false
}

variable "roles" {
  description = "Roles to make a policy, a user and credentials for: reader, writer, prewarm, maintainer."
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

variable "tags" {
  description = "Tags of the users; MinIO tags nothing else here."
  type        = map(string)
  default     = {}
  nullable    = false
}
