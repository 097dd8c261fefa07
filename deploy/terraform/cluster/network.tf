# One small network with one public subnet. Hosts have public addresses to reach SSM, S3 and CloudWatch: half a cent an
# hour each, where a NAT gateway costs more than ten times that and every byte. Nothing can reach them: see security.tf.

resource "aws_vpc" "this" {
  count = local.makes_subnet && var.vpc_id == null ? 1 : 0

  #checkov:skip=CKV2_AWS_11:Flow logs of a network of one user's training cost more than they tell; security groups refuse everything that is not listed.
  cidr_block           = var.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true

  tags = { Name = var.name }
}

# The group that a host without a group would get: it lets nothing in or out.
resource "aws_default_security_group" "nothing" {
  count = length(aws_vpc.this)

  vpc_id = aws_vpc.this[count.index].id

  tags = { Name = "${var.name}-nothing" }
}

resource "aws_subnet" "this" {
  count = local.makes_subnet ? 1 : 0

  vpc_id            = local.vpc_id
  cidr_block        = var.vpc_cidr
  availability_zone = terraform_data.zone.input

  tags = { Name = var.name }
}

data "aws_subnet" "existing" {
  for_each = toset(var.subnet_ids)

  id = each.key
}

# Another subnet, as of another zone, replaces the groups of hosts.
resource "terraform_data" "subnet" {
  triggers_replace = local.subnet_id

  lifecycle {
    precondition {
      condition     = contains(local.zones, terraform_data.zone.input)
      error_message = "The cluster is in ${terraform_data.zone.input}, which does not offer ${coalesce(join(", ", try(local.types_missing_in_zone[terraform_data.zone.input], ["anything"])), "a subnet of subnet_ids")}. Change replay_instance_type, learner_instance_types or actor_instance_types; or `terraform -chdir=deploy/terraform/cluster apply -replace=terraform_data.zone`, which makes all hosts anew in a zone that offers them."
    }
  }
}

# AWS gives a reserved address to nobody by itself: otherwise an actor might sit on one of these when its host is made anew.
resource "aws_ec2_subnet_cidr_reservation" "fixed" {
  for_each = merge({ replay = local.replay_address }, { for host in local.learner_hosts : host.name => host.address })

  subnet_id        = local.subnet_id
  cidr_block       = "${each.value}/32"
  reservation_type = "explicit"
  description      = "The ${each.key} host"
}

resource "aws_internet_gateway" "this" {
  count = length(aws_vpc.this)

  vpc_id = aws_vpc.this[count.index].id

  tags = { Name = var.name }
}

data "aws_internet_gateway" "existing" {
  count = var.vpc_id == null ? 0 : 1

  filter {
    name   = "attachment.vpc-id"
    values = [var.vpc_id]
  }
}

locals {
  makes_subnet = length(var.subnet_ids) == 0
  of_subnets   = local.makes_subnet ? "" : " in a zone of subnet_ids"

  # The subnets that exist, by zone; the first of each.
  subnets_of_zones = { for id in var.subnet_ids : data.aws_subnet.existing[id].availability_zone => data.aws_subnet.existing[id]... }
  existing         = try(local.subnets_of_zones[terraform_data.zone.input][0], null)

  subnet_id       = try(local.existing.id, one(aws_subnet.this[*].id))
  vpc_id          = try(local.existing.vpc_id, coalesce(var.vpc_id, one(aws_vpc.this[*].id)), null)
  gateway_id      = try(coalesce(one(aws_internet_gateway.this[*].id), one(data.aws_internet_gateway.existing[*].id)), null)
  gives_public_ip = try(local.existing.map_public_ip_on_launch, true)
  fixed_addresses = [for place in range(1 + var.learner_hosts) : local.makes_subnet ? cidrhost(var.vpc_cidr, 10 + place) : try(cidrhost(local.existing.cidr_block, -10 - place), null)]
}

resource "aws_route_table" "this" {
  count = length(aws_subnet.this)

  vpc_id = local.vpc_id

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = local.gateway_id
  }

  tags = { Name = var.name }
}

resource "aws_route_table_association" "this" {
  count = length(aws_subnet.this)

  subnet_id      = aws_subnet.this[count.index].id
  route_table_id = aws_route_table.this[count.index].id
}

# Checkpoints go to S3 inside AWS; a gateway endpoint is free.
resource "aws_vpc_endpoint" "s3" {
  count = length(aws_subnet.this)

  vpc_id            = local.vpc_id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = aws_route_table.this[*].id

  tags = { Name = "${var.name}-s3" }
}
