# A learner host is its rank: the first one writes the run. Rank and address are those of its place in the list, so that
# a host that takes the place of another is the same one to all others.

resource "aws_instance" "learner" {
  #checkov:skip=CKV_AWS_88:A public address is the cheapest way out to SSM, S3 and CloudWatch; only operator_cidrs get in, and only to TensorBoard.
  #checkov:skip=CKV_AWS_126:Detailed monitoring costs money; the roles report their own figures every few seconds.
  count = var.learner_hosts

  ami                         = local.image_id.gpu
  instance_type               = var.learner_instance_type
  subnet_id                   = aws_subnet.this.id
  private_ip                  = local.learner_hosts[count.index].address
  associate_public_ip_address = true
  vpc_security_group_ids      = [aws_security_group.role["learner"].id]
  iam_instance_profile        = aws_iam_instance_profile.host["learner"].name
  placement_group             = one(aws_placement_group.this[*].name)
  ebs_optimized               = true

  user_data                   = local.user_data[local.learner_hosts[count.index].name]
  user_data_replace_on_change = true

  instance_initiated_shutdown_behavior = "terminate"

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = var.learner_volume_gib
    encrypted             = true
    delete_on_termination = true
    tags                  = { Name = "${var.name}-${local.learner_hosts[count.index].name}", Role = "learner" } # beside the provider's default tags
  }

  tags = { Name = "${var.name}-${local.learner_hosts[count.index].name}", Role = "learner" }

  # Destroyed before these: its last upload still needs its rights and its way to S3.
  depends_on = [
    aws_iam_role_policy.deadline, aws_iam_role_policy.finish, aws_iam_role_policy.keys, aws_iam_role_policy.logs,
    aws_iam_role_policy.results, aws_iam_role_policy.session,
    aws_route_table_association.this, aws_vpc_endpoint.s3, aws_vpc_security_group_egress_rule.aws,
  ]
}
