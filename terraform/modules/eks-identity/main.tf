# One role for one service account of one cluster, with one policy.

locals {
  issuer = var.mode == "irsa" ? split(":oidc-provider/", var.oidc_provider_arn)[1] : ""

  trust = {
    pod_identity = {
      Sid       = "PodIdentity"
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Condition = {
        StringEquals = {
          "aws:RequestTag/eks-cluster-arn"            = var.cluster_arn
          "aws:RequestTag/kubernetes-namespace"       = var.namespace
          "aws:RequestTag/kubernetes-service-account" = var.service_account
        }
      }
    }
    irsa = {
      Sid       = "ServiceAccount"
      Effect    = "Allow"
      Principal = { Federated = var.oidc_provider_arn }
      Action    = ["sts:AssumeRoleWithWebIdentity"]
      Condition = {
        StringEquals = {
          "${local.issuer}:aud" = "sts.amazonaws.com"
          "${local.issuer}:sub" = "system:serviceaccount:${var.namespace}:${var.service_account}"
        }
      }
    }
  }
}

resource "aws_iam_role" "this" {
  name        = var.name
  description = "Encoder cache for ${var.namespace}/${var.service_account}"
  tags        = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      for mode, statement in local.trust : statement if mode == var.mode
    ]
  })
}

resource "aws_iam_role_policy_attachment" "this" {
  role       = aws_iam_role.this.name
  policy_arn = var.policy_arn
}

resource "aws_eks_pod_identity_association" "this" {
  count = var.mode == "pod_identity" ? 1 : 0

  cluster_name    = split("/", var.cluster_arn)[1]
  namespace       = var.namespace
  service_account = var.service_account
  role_arn        = aws_iam_role.this.arn
  tags            = var.tags
}
