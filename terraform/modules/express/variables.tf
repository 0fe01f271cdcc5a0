variable "bucket_name" {
  description = "First part of the bucket's name; the zone and `--x-s3` are appended."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,40}[a-z0-9]$", var.bucket_name)) && !strcontains(var.bucket_name, "--")
    error_message = "bucket_name: must be 3 to 42 lower-case letters, digits and single hyphens; leave `--zone--x-s3` out, it is appended."
  }
}

variable "zone_id" {
  description = "ID of the availability zone (use1-az4), that of the servers: another zone costs what Express saves."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+[0-9]-az[0-9]+$", var.zone_id))
    error_message = "zone_id: must be a zone's ID such as use1-az4, not its name such as us-east-1a; `aws ec2 describe-availability-zones` lists both."
  }
}

variable "prefix" {
  description = "Prefix of the cache in the bucket; empty for the whole bucket. Rights are for the whole bucket either way."
  type        = string
  default     = "ec"
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9_=-][A-Za-z0-9_=.-]*(/[A-Za-z0-9_=-][A-Za-z0-9_=.-]*)*)?$", var.prefix))
    error_message = "prefix: must look like \"team/cache\", without a slash at either end; rename it."
  }
}

variable "expire_days" {
  description = "Age in days at which items expire. S3 counts from an item's writing, not from its last use."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.expire_days >= 1 && floor(var.expire_days) == var.expire_days
    error_message = "expire_days: must be a whole number of days, 1 or more; S3 knows no shorter age."
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

variable "gateway_endpoint" {
  description = "Makes a gateway endpoint for S3 Express (another service than that of S3), so that traffic passes no NAT gateway."
  type = object({
    vpc_id          = string
    route_table_ids = set(string)
  })
  default = null

  validation {
    condition     = var.gateway_endpoint == null || try(length(var.gateway_endpoint.route_table_ids) > 0, false)
    error_message = "gateway_endpoint: route_table_ids is empty, so nothing would use the endpoint; name the private route tables."
  }
}

variable "tags" {
  description = "Tags of the policies and the endpoint; those of a directory bucket need a later provider."
  type        = map(string)
  default     = {}
  nullable    = false
}
