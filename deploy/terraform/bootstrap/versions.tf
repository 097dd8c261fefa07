# What has to outlive every cluster: the bucket of Terraform's state, the bucket of results, the role of image builds,
# and an alarm about money.
# Its own state stays in this directory, because the bucket for states is made here. Lost, nothing is broken: import it.
terraform {
  required_version = ">= 1.11, < 2.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 6.25, < 7.0"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = {
      Project   = "apexrl"
      ManagedBy = "terraform"
      Stack     = "bootstrap"
    }
  }
}
