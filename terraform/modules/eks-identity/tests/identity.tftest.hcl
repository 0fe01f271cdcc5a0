mock_provider "aws" {
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/server" }
  }
}

variables {
  name            = "server"
  namespace       = "vllm"
  service_account = "vllm"
  policy_arn      = "arn:aws:iam::123456789012:policy/ec-s3-writer"
  cluster_arn     = "arn:aws:eks:eu-west-1:123456789012:cluster/example"
}

run "pod_identity_trusts_one_service_account_of_one_cluster" {
  assert {
    condition = jsondecode(aws_iam_role.this.assume_role_policy).Statement == [{
      Sid       = "PodIdentity"
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Condition = {
        StringEquals = {
          "aws:RequestTag/eks-cluster-arn"            = "arn:aws:eks:eu-west-1:123456789012:cluster/example"
          "aws:RequestTag/kubernetes-namespace"       = "vllm"
          "aws:RequestTag/kubernetes-service-account" = "vllm"
        }
      }
    }]
    error_message = "Others may take the role."
  }

  assert {
    condition     = aws_eks_pod_identity_association.this[0].cluster_name == "example"
    error_message = "The role is associated with another cluster."
  }

  assert {
    condition     = aws_iam_role_policy_attachment.this.policy_arn == var.policy_arn && length(output.service_account_annotations) == 0
    error_message = "The role lacks its policy, or asks for annotations."
  }
}

run "irsa_trusts_one_service_account_of_one_issuer" {
  variables {
    mode              = "irsa"
    cluster_arn       = ""
    oidc_provider_arn = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC"
  }

  assert {
    condition = jsondecode(aws_iam_role.this.assume_role_policy).Statement == [{
      Sid       = "ServiceAccount"
      Effect    = "Allow"
      Principal = { Federated = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/ABC" }
      Action    = ["sts:AssumeRoleWithWebIdentity"]
      Condition = {
        StringEquals = {
          "oidc.eks.eu-west-1.amazonaws.com/id/ABC:aud" = "sts.amazonaws.com"
          "oidc.eks.eu-west-1.amazonaws.com/id/ABC:sub" = "system:serviceaccount:vllm:vllm"
        }
      }
    }]
    error_message = "Others may take the role."
  }

  assert {
    condition     = length(aws_eks_pod_identity_association.this) == 0 && output.service_account_annotations["eks.amazonaws.com/role-arn"] == aws_iam_role.this.arn
    error_message = "The service account is not told its role."
  }
}

run "pod_identity_without_a_cluster_is_refused" {
  command = plan
  variables {
    cluster_arn = ""
  }
  expect_failures = [var.cluster_arn]
}

run "irsa_without_a_provider_is_refused" {
  command = plan
  variables {
    mode = "irsa"
  }
  expect_failures = [var.oidc_provider_arn]
}

run "an_unknown_mode_is_refused" {
  command = plan
  variables {
    mode = "kiam"
  }
  expect_failures = [var.mode]
}

run "patterns_of_service_accounts_are_refused" {
  command = plan
  variables {
    namespace       = "*"
    service_account = "vllm-*"
  }
  expect_failures = [var.namespace, var.service_account]
}

run "an_inline_policy_is_refused" {
  command = plan
  variables {
    policy_arn = "{}"
  }
  expect_failures = [var.policy_arn]
}
