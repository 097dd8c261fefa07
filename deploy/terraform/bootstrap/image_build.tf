# The role of the instances on which Packer builds images: all that Session Manager's agent needs. It lives as long as
# the buckets, because a role made with a build is not known everywhere when the agent asks for it.

locals {
  image_build = "${var.name}-${var.region}-image-build" # as in deploy/packer/apexrl.pkr.hcl
}

resource "aws_iam_role" "image_build" {
  permissions_boundary = var.permissions_boundary
  name                 = local.image_build
  description          = "Instances on which Packer builds the images of ${var.name}"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "image_build" {
  #checkov:skip=CKV_AWS_290:Channels of Session Manager have no names before they are opened; AWS's own policy says * as well.
  #checkov:skip=CKV_AWS_355:Channels of Session Manager have no names before they are opened; AWS's own policy says * as well.
  name = "session"
  role = aws_iam_role.image_build.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid    = "Session"
      Effect = "Allow"
      Action = [
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
      Resource = "*"
    }]
  })
}

resource "aws_iam_instance_profile" "image_build" {
  name = aws_iam_role.image_build.name
  role = aws_iam_role.image_build.name
}
