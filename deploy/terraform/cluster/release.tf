# Hosts without images of one's own: the public base images of Packer's template, where each host installs a release from
# the results bucket at its first start. `python -m deploy up` puts it there. It needs no build, and takes each host some
# minutes longer to start; fleets, whose hosts come and go, want images.

locals {
  image_roles = toset(var.release == null ? ["cpu", "gpu"] : []) # of images of one's own

  # Canonical's and AWS's names for the newest image; device and size as in Packer's template.
  base_images = var.release == null ? {} : {
    cpu = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
    gpu = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
  }
  base_disk = "/dev/sda1"
  base_gib  = { cpu = 16, gpu = 100 }

  release_key = "releases/${coalesce(var.release, "none")}.tar"
}

data "aws_ssm_parameter" "base_image" {
  for_each = local.base_images

  name = each.value
}

resource "aws_iam_role_policy" "release" {
  for_each = { for role, owned in local.secrets : role => owned if var.release != null }

  name = "release"
  role = aws_iam_role.host[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid      = "Release"
      Effect   = "Allow"
      Action   = ["s3:GetObject"]
      Resource = ["${local.store_arn}/${local.release_key}"]
    }]
  })
}

# Ubuntu's packages come by http, or by the proxy: they are signed.
resource "aws_vpc_security_group_egress_rule" "packages" {
  for_each = { for role, group in aws_security_group.role : role => group if var.release != null && var.proxy == null }

  security_group_id = each.value.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 80
  to_port           = 80
  description       = "Packages of Ubuntu"

  tags = { Name = "${var.name}-${each.key}-packages" }
}
