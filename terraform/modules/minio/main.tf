# The same cache on MinIO: the same policies, with a user and credentials for each role.
# No bucket policy: MinIO applies it to anonymous requests alone, and those are refused anyway.

module "policies" {
  source = "../policies"

  bucket   = var.bucket_name
  prefix   = var.prefix
  tagged   = var.tagged
  endpoint = var.endpoint
}

resource "minio_s3_bucket" "this" {
  bucket        = var.bucket_name
  acl           = "private"
  force_destroy = var.force_destroy
}

# Unfinished uploads need no rule: MinIO removes them after a day by itself. A rule knows no size here,
# so a namespace's description and kill switch expire with the items.
resource "minio_ilm_policy" "this" {
  bucket = minio_s3_bucket.this.bucket

  rule {
    id         = "ec-s3-items"
    expiration = "${var.expire_days}d"
    filter     = module.policies.items_prefix
  }
}

resource "minio_iam_policy" "this" {
  for_each = var.roles

  name   = "ec-s3-${var.bucket_name}-${each.key}"
  policy = module.policies.role_policies[each.key]
}

resource "minio_iam_user" "this" {
  for_each = var.roles

  name          = "ec-s3-${var.bucket_name}-${each.key}"
  force_destroy = true # its access keys go with it
  tags          = var.tags
}

resource "minio_iam_user_policy_attachment" "this" {
  for_each = var.roles

  user_name   = minio_iam_user.this[each.key].name
  policy_name = minio_iam_policy.this[each.key].name
}

resource "minio_iam_service_account" "this" {
  for_each = var.roles

  target_user = minio_iam_user.this[each.key].name

  depends_on = [minio_iam_user_policy_attachment.this] # its rights are those of the user
}
