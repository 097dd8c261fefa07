data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  # Names are shared by all accounts of the partition; the account's number keeps them ours.
  buckets = {
    for purpose in ["state", "results"] :
    purpose => "${var.name}-${purpose}-${data.aws_caller_identity.current.account_id}-${var.region}"
  }
  bucket_arns = { for purpose, name in local.buckets : purpose => "arn:${data.aws_partition.current.partition}:s3:::${name}" }
}

resource "aws_s3_bucket" "this" {
  #checkov:skip=CKV_AWS_18:Access logs of two private buckets of one user cost more than they tell; CloudTrail has the management events.
  #checkov:skip=CKV_AWS_144:A copy in a second region doubles the price; a lost region costs a training run, not a business.
  #checkov:skip=CKV_AWS_145:SSE-S3 encrypts at rest; a KMS key costs a dollar a month and a request fee, and would guard against nobody else here.
  #checkov:skip=CKV2_AWS_62:Nobody listens to events of these buckets.
  for_each = local.buckets

  bucket = each.value

  tags = { Purpose = each.key }

  # `terraform destroy` here would take every checkpoint along: it is refused. Empty and delete the buckets by hand.
  lifecycle {
    prevent_destroy = true
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  for_each = local.buckets

  bucket                  = aws_s3_bucket.this[each.key].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  for_each = local.buckets

  bucket = aws_s3_bucket.this[each.key].id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_versioning" "this" {
  for_each = local.buckets

  bucket = aws_s3_bucket.this[each.key].id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  for_each = local.buckets

  bucket = aws_s3_bucket.this[each.key].id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

# Older versions of states are a history. Those of checkpoints, which are overwritten every few minutes, would soon cost
# more than the hosts: a day of them is enough to get back from a mistake.
resource "aws_s3_bucket_lifecycle_configuration" "this" {
  for_each = local.buckets

  bucket = aws_s3_bucket.this[each.key].id

  rule {
    id     = "expire-older-versions"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = each.key == "results" ? 1 : 90
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }

  depends_on = [aws_s3_bucket_versioning.this] # there are no older versions before
}

resource "aws_s3_bucket_policy" "this" {
  for_each = local.buckets

  bucket = aws_s3_bucket.this[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "RefuseUnencryptedTransport"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [local.bucket_arns[each.key], "${local.bucket_arns[each.key]}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })

  # A policy is refused while the block is being put in place.
  depends_on = [aws_s3_bucket_public_access_block.this]
}
