variable "name" {
  description = "Name of the IAM role."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_+=,.@-]{1,64}$", var.name))
    error_message = "name: must be 1 to 64 letters, digits and _ + = , . @ -; shorten it."
  }
}

variable "mode" {
  description = "How pods get the role: `pod_identity` (needs the EKS Pod Identity agent) or `irsa` (needs an OIDC provider)."
  type        = string
  default     = "pod_identity"
  nullable    = false

  validation {
    condition     = contains(["pod_identity", "irsa"], var.mode)
    error_message = "mode: must be \"pod_identity\" or \"irsa\"."
  }
}

variable "cluster_arn" {
  description = "ARN of the EKS cluster, for `pod_identity`."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.mode == "irsa" || can(regex("^arn:[a-z-]+:eks:[a-z0-9-]+:[0-9]{12}:cluster/.+$", var.cluster_arn))
    error_message = "cluster_arn: mode \"pod_identity\" needs the cluster's ARN; take it from data.aws_eks_cluster.NAME.arn."
  }
}

variable "oidc_provider_arn" {
  description = "ARN of the cluster's OIDC provider in IAM, for `irsa`."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.mode == "pod_identity" || can(regex("^arn:[a-z-]+:iam::[0-9]{12}:oidc-provider/.+$", var.oidc_provider_arn))
    error_message = "oidc_provider_arn: mode \"irsa\" needs the OIDC provider's ARN; make one for the cluster's issuer (aws_iam_openid_connect_provider)."
  }
}

variable "namespace" {
  description = "Kubernetes namespace of the service account."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.namespace))
    error_message = "namespace: must be the name of one namespace; patterns would let other pods in."
  }
}

variable "service_account" {
  description = "Kubernetes service account that gets the role."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", var.service_account))
    error_message = "service_account: must be the name of one service account; patterns would let other pods in."
  }
}

variable "policy_arn" {
  description = "Policy of the role: one of the root module's `policy_arns`."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^arn:[a-z-]+:iam::", var.policy_arn))
    error_message = "policy_arn: must be the ARN of an IAM policy, such as module.cache.policy_arns[\"writer\"]."
  }
}

variable "tags" {
  description = "Tags of everything that this module makes."
  type        = map(string)
  default     = {}
  nullable    = false
}
