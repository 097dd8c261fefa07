# Two images of one version: cpu for the replay, the actors and the evaluator, gpu for the learner and TensorBoard.
#
#   packer init deploy/packer
#   packer build -var version=$(git describe --tags --always) deploy/packer
#
# Terraform finds them by their tags. Which role a host plays is said by its user-data, not by its image.
# Lines that end with "packer >= 1.7" are unknown to older versions.

locals {
  instance_profile = var.instance_profile != "" ? var.instance_profile : "apexrl-${var.region}-image-build"

  built_at = formatdate("YYYYMMDDhhmmss", timestamp())
  root     = "${path.root}/../.."
  release  = "${local.root}/build/release"
  tags = {
    Project       = "apexrl"
    Version       = var.version
    BaseImage     = "{{ .SourceAMI }}"
    BaseImageName = "{{ .SourceAMIName }}"
  }
}

source "amazon-ebs" "base" {
  region              = var.region
  custom_endpoint_ec2 = var.ec2_endpoint
  # Checked before anything is started only where the list of regions can be asked for.
  skip_region_validation      = var.ec2_endpoint != ""
  skip_metadata_api_check     = var.ec2_endpoint != ""
  instance_type               = var.instance_type
  subnet_id                   = var.subnet_id
  associate_public_ip_address = true

  communicator  = "ssh"
  ssh_username  = "ubuntu"
  ssh_interface = var.ssh_interface
  ssh_host      = var.ssh_host
  ssh_port      = var.ssh_port
  # An agent of Session Manager that starts before its role is known everywhere sleeps for half an hour.
  ssh_timeout = "40m"
  # Without this Packer would open port 22 to the whole internet for the build.
  temporary_security_group_source_cidrs = var.ssh_cidrs

  # Made by deploy/terraform/bootstrap: a profile as old as the build itself is not known everywhere in time.
  iam_instance_profile = local.instance_profile
  user_data_file       = "${local.root}/deploy/files/session_agent.sh"

  imds_support = "v2.0"                      # packer >= 1.7
  metadata_options {                         # packer >= 1.7
    http_endpoint               = "enabled"  # packer >= 1.7
    http_tokens                 = "required" # packer >= 1.7
    http_put_response_hop_limit = 1          # packer >= 1.7
  }                                          # packer >= 1.7

  run_tags        = { Project = "apexrl", Version = var.version, Name = "apexrl image build" }
  run_volume_tags = { Project = "apexrl", Version = var.version, Name = "apexrl image build" }

  # The snapshot of a large image may take longer than the half hour that is Packer's own patience.
  aws_polling {         # packer >= 1.7
    delay_seconds = 30  # packer >= 1.7
    max_attempts  = 240 # packer >= 1.7
  }                     # packer >= 1.7
}

build {
  name = "apexrl"

  source "amazon-ebs.base" {
    name            = "cpu"
    ami_name        = "apexrl-cpu-${var.version}-${local.built_at}"
    ami_description = "apexrl ${var.version}: replay, actors, evaluator"
    tags            = merge(local.tags, { Name = "apexrl-cpu-${var.version}", Role = "cpu" })
    snapshot_tags   = merge(local.tags, { Name = "apexrl-cpu-${var.version}", Role = "cpu" })

    source_ami = local.base_images.cpu

    launch_block_device_mappings {
      device_name           = "/dev/sda1"
      volume_type           = "gp3"
      volume_size           = var.cpu_volume_gib
      iops                  = 3000
      throughput            = 125
      encrypted             = true
      kms_key_id            = var.kms_key_id
      delete_on_termination = true
    }
  }

  source "amazon-ebs.base" {
    name            = "gpu"
    ami_name        = "apexrl-gpu-${var.version}-${local.built_at}"
    ami_description = "apexrl ${var.version}: learner, TensorBoard"
    tags            = merge(local.tags, { Name = "apexrl-gpu-${var.version}", Role = "gpu" })
    snapshot_tags   = merge(local.tags, { Name = "apexrl-gpu-${var.version}", Role = "gpu" })

    # NVIDIA's driver is in it; CUDA itself comes with torch's wheels.
    source_ami = local.base_images.gpu

    launch_block_device_mappings {
      device_name           = "/dev/sda1"
      volume_type           = "gp3"
      volume_size           = var.gpu_volume_gib
      iops                  = 3000
      throughput            = 125
      encrypted             = true
      kms_key_id            = var.kms_key_id
      delete_on_termination = true
    }
  }

  # The release is made here, of what git holds at the version; nothing is cloned on the instance.
  provisioner "shell-local" {
    command = "${path.root}/release.sh ${var.version} ${local.release}-${source.name}.tar"
  }

  provisioner "file" {
    source      = "${local.release}-${source.name}.tar"
    destination = "/tmp/apexrl-release.tar"
    generated   = true
  }

  # cloud-init still works on the package lists in the first seconds of an instance.
  provisioner "shell" {
    inline = ["sudo cloud-init status --wait"]
    # 2: done, with something that it can live with.
    valid_exit_codes = [0, 2]
    timeout          = "5m"
  }

  provisioner "shell" {
    script          = "${path.root}/install.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "APEXRL_VERSION=${var.version}",
      "APEXRL_IMAGE=${source.name}",
      "APEXRL_RELEASE=/tmp/apexrl-release.tar",
    ]
    timeout = "30m"
  }

  provisioner "shell" {
    script           = "${path.root}/agent.sh"
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = ["CLOUDWATCH_AGENT_URL=${var.cloudwatch_agent_url}"]
    timeout          = "15m"
  }

  provisioner "shell" {
    script          = "${path.root}/cleanup.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    timeout         = "5m"
  }

  post-processor "manifest" {
    output = "${local.root}/build/images.json"
    custom_data = {
      version = var.version
      image   = source.name
    }
  }
}
