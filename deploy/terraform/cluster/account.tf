# Of accounts with rules of their own: a network, a proxy, a boundary and a key that exist.

variable "vpc_id" {
  description = "A VPC with an internet gateway that gets the cluster's subnet, whose addresses are vpc_cidr: a range of that VPC that nothing uses. null: a VPC of the cluster's own."
  type        = string
  default     = null

  validation {
    condition     = var.vpc_id == null || can(regex("^vpc-[0-9a-f]+$", var.vpc_id))
    error_message = "vpc_id has to be the id of a VPC, such as vpc-0123456789abcdef0; leave it out to get one."
  }
}

variable "subnet_ids" {
  description = "Subnets that the cluster runs in, where nobody may make one: the first of its zone. Their hosts need a way out to AWS; they get public addresses where the subnet gives them. Replay and learners take the 10th address from the end, and those before it. Empty: a subnet of the cluster's own."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for id in var.subnet_ids : can(regex("^subnet-[0-9a-f]+$", id))])
    error_message = "subnet_ids has to hold ids of subnets, such as [\"subnet-0123456789abcdef0\"]; leave it out to get one."
  }

  validation {
    condition     = length(var.subnet_ids) == 0 || var.vpc_id == null
    error_message = "subnet_ids and vpc_id exclude each other: the cluster runs in subnets that exist, or makes one in a VPC that exists."
  }
}

variable "proxy" {
  description = "Proxy by which hosts reach AWS and packages, such as http://proxy.example.com:3128. Everybody on a host can read it: no password. null: none."
  type        = string
  default     = null

  validation {
    condition     = var.proxy == null || can(regex("^http://[A-Za-z0-9.-]+:[1-9][0-9]{0,4}$", var.proxy))
    error_message = "proxy has to be http://HOST:PORT, without a password, such as http://proxy.example.com:3128; leave it out for none."
  }
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds each IAM role, where an organization lets nobody make roles without one; null: none."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/.+$", var.permissions_boundary))
    error_message = "permissions_boundary has to be the ARN of an IAM policy, such as arn:aws:iam::123456789012:policy/boundary."
  }
}

variable "kms_key_id" {
  description = "ARN of the KMS key that encrypts all volumes; null: the account's key for EBS. The key has to let AWSServiceRoleForAutoScaling use it, or no learner or actor host starts."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_id == null || can(regex("^arn:aws[a-z-]*:kms:${var.region}:[0-9]{12}:key/.+$", var.kms_key_id))
    error_message = "kms_key_id has to be the ARN of a KMS key in region ${var.region}, such as arn:aws:kms:${var.region}:123456789012:key/ID."
  }
}
