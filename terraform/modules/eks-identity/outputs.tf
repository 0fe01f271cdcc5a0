output "role_arn" {
  description = "ARN of the role."
  value       = aws_iam_role.this.arn
}

output "service_account_annotations" {
  description = "Annotations that the service account needs; none with Pod Identity."
  value       = var.mode == "irsa" ? { "eks.amazonaws.com/role-arn" = aws_iam_role.this.arn } : {}
}
