# It costs nothing and stays where it is not used: AWS deletes none that a host is still in, as the learner's is until
# that is replaced.
resource "aws_placement_group" "this" {
  name     = var.name
  strategy = "cluster"
}

# The journal of experience outlives its host: it is attached again to the next one, whatever that was replaced for.
resource "aws_ebs_volume" "journal" {
  #checkov:skip=CKV_AWS_189:EBS encrypts with the account's own key; a KMS key costs a dollar a month, and experience is no secret.
  availability_zone = terraform_data.zone.input
  type              = "gp3"
  size              = var.replay_volume_gib
  throughput        = 250 # MB/s: the server writes while it serves
  encrypted         = true
  kms_key_id        = var.kms_key_id

  tags = { Name = "${var.name}-journal", Role = "replay" }
}

# There have been actor hosts. It stays while those of another run are made: without it `python -m deploy up` may go on in
# another zone, which makes the volume anew.
resource "terraform_data" "experience" {
  triggers_replace = aws_ebs_volume.journal.id

  depends_on = [aws_autoscaling_group.actor]
}

resource "aws_volume_attachment" "journal" {
  device_name = "/dev/sdf" # on the host it has the name of an NVMe device, and the volume's id for its serial number
  volume_id   = aws_ebs_volume.journal.id
  instance_id = aws_instance.replay.id

  # The server then closes its journal, and nothing is on the way to the disk.
  stop_instance_before_detaching = true
}

resource "aws_instance" "replay" {
  #checkov:skip=CKV_AWS_88:A public address is the cheapest way out to SSM, S3 and CloudWatch; no group lets anything in to it.
  #checkov:skip=CKV_AWS_126:Detailed monitoring costs money; the roles report their own figures every few seconds.
  ami                         = local.image_id.cpu
  instance_type               = var.replay_instance_type
  subnet_id                   = local.subnet_id
  private_ip                  = local.replay_address
  associate_public_ip_address = local.gives_public_ip
  vpc_security_group_ids      = [aws_security_group.role["replay"].id]
  iam_instance_profile        = aws_iam_instance_profile.host["replay"].name
  placement_group             = var.use_placement_group ? aws_placement_group.this.name : null
  ebs_optimized               = true

  user_data                   = local.user_data.replay
  user_data_replace_on_change = true

  # At the time limit a host powers itself off: that has to end its costs.
  instance_initiated_shutdown_behavior = "terminate"

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type           = "gp3"
    volume_size           = local.image_gib.cpu
    encrypted             = true
    kms_key_id            = var.kms_key_id
    delete_on_termination = true
    tags                  = { Name = "${var.name}-replay", Role = "replay" } # beside the provider's default tags
  }

  tags = { Name = "${var.name}-replay", Role = "replay" }

  # A host that starts before it may read its keys would only wait for them.
  depends_on = [
    aws_iam_role_policy.deadline, aws_iam_role_policy.keys, aws_iam_role_policy.logs, aws_iam_role_policy.session, aws_route_table_association.this,
    aws_vpc_security_group_egress_rule.aws, aws_vpc_security_group_egress_rule.proxy,
  ]
}
