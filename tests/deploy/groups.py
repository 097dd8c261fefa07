"""Auto Scaling groups in moto, which want one host each, and how many they want later."""

from tests.deploy.moto_process import Aws


def make_groups(aws: Aws, *names: str) -> None:
    """Makes groups of one host."""
    ec2, autoscaling = aws.client("ec2"), aws.client("autoscaling")
    image = ec2.register_image(Name="a host")["ImageId"]
    for name in names:
        template = {"ImageId": image, "InstanceType": "c7i.large"}
        ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=template)
        autoscaling.create_auto_scaling_group(
            AutoScalingGroupName=name, MinSize=0, MaxSize=1, DesiredCapacity=1, AvailabilityZones=["us-east-1a"],
            LaunchTemplate={"LaunchTemplateName": name},
        )  # fmt: skip


def wanted_hosts(aws: Aws) -> dict[str, int]:
    """Returns the number of hosts that each group wants."""
    groups = aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    return {group["AutoScalingGroupName"]: group["DesiredCapacity"] for group in groups}
