terraform {
  required_version = ">= 1.11, < 2.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 6.25, < 7.0"
    }
  }

  # Bucket and region come from bootstrap: terraform init -backend-config=backend.hcl
  # A second cluster needs a state of its own: add -backend-config=key=cluster/ANOTHER.tfstate
  backend "s3" {
    key          = "cluster/apexrl.tfstate"
    encrypt      = true
    use_lockfile = true
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = local.tags
  }
}
