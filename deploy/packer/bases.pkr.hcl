# The newest base images, by the parameters in which their makers publish them. In a file of its own: Packer before 1.7
# does not know data sources.
data "amazon-parameterstore" "cpu" {
  region = var.region
  name   = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
}

# NVIDIA's driver is in it; CUDA itself comes with torch's wheels. AWS calls it the Deep Learning Base AMI.
data "amazon-parameterstore" "gpu" {
  region = var.region
  name   = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
}

locals {
  base_images = {
    cpu = data.amazon-parameterstore.cpu.value
    gpu = data.amazon-parameterstore.gpu.value
  }
}
