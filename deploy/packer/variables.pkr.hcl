variable "version" {
  type        = string
  description = "Git tag or commit that the images are made of; it has to be checked out. For example $(git describe --tags --always)."

  validation {
    condition     = regex_replace(var.version, "^[0-9A-Za-z][0-9A-Za-z._-]{0,63}$", "valid") == "valid"
    error_message = "The version has to be a git tag or commit: letters, digits, '.', '_' and '-'; give -var version=$(git describe --tags --always)."
  }
}

variable "region" {
  type        = string
  default     = "us-east-1"
  description = "AWS region of the build and of the images; the cluster has to run in the same one."

  validation {
    condition     = regex_replace(var.region, "^[a-z]{2}(-[a-z]+)+-[0-9]$", "valid") == "valid"
    error_message = "The region has to look like us-east-1; list them with: aws ec2 describe-regions."
  }
}

variable "instance_type" {
  type        = string
  default     = "c7i.xlarge"
  description = "Instance that both images are built on, x86_64. The GPU image needs no GPU for its build."
}

variable "cpu_volume_gib" {
  type        = number
  default     = 16
  description = "Root volume of the cpu image in GiB; the cluster's volumes may be larger, never smaller."

  validation {
    condition     = var.cpu_volume_gib >= 12
    error_message = "The cpu image needs at least 12 GiB."
  }
}

variable "gpu_volume_gib" {
  type        = number
  default     = 100
  description = "Root volume of the gpu image in GiB; the Deep Learning Base AMI alone takes most of 75."

  validation {
    condition     = var.gpu_volume_gib >= 75
    error_message = "The gpu image needs at least 75 GiB: its base image is that large."
  }
}

variable "kms_key_id" {
  type        = string
  default     = ""
  description = "KMS key that encrypts the images; empty: the account's default key for EBS. A key of your own has to let AWSServiceRoleForAutoScaling use it, or no actor host starts."
}

variable "instance_profile" {
  type        = string
  default     = ""
  description = "Instance profile of the build instance; empty: the one that deploy/terraform/bootstrap makes in the region, apexrl-REGION-image-build."
}

variable "subnet_id" {
  type        = string
  default     = ""
  description = "Subnet of the build instance, with a way out to the internet; empty: one of the default VPC."
}

variable "cloudwatch_agent_url" {
  type        = string
  default     = "https://amazoncloudwatch-agent.s3.amazonaws.com"
  description = "Where the CloudWatch agent and the key that signs it are published; empty: images without the agent."
}

# The connection of the build. The default needs no open port and no public key pair: Session Manager carries it.
variable "ssh_interface" {
  type        = string
  default     = "session_manager"
  description = "How Packer reaches the build instance: session_manager, or private_ip or public_ip from inside a network."

  validation {
    condition     = contains(["session_manager", "private_ip", "public_ip"], var.ssh_interface)
    error_message = "The ssh_interface has to be session_manager, private_ip or public_ip."
  }
}

variable "ssh_cidrs" {
  type        = list(string)
  default     = ["127.0.0.1/32"]
  description = "Who may reach port 22 of the build instance; nobody has to with session_manager."
}

variable "ssh_host" {
  type        = string
  default     = ""
  description = "Address to connect to instead of the one that ssh_interface names, such as a forwarded port's."
}

variable "ssh_port" {
  type        = number
  default     = 22
  description = "Port that goes with ssh_host."
}

variable "ec2_endpoint" {
  type        = string
  default     = ""
  description = "URL of the EC2 API, where it is not the public one of the region (a VPC endpoint)."
}
