# One managed policy for each role; what it grants is in modules/policies.

resource "aws_iam_policy" "this" {
  for_each = var.roles

  name        = "ec-s3-${var.bucket_name}-${each.key}"
  description = "Encoder cache in ${var.bucket_name}: ${each.key}"
  policy      = module.policies.role_policies[each.key]
  tags        = var.tags
}
