# Two hosts of four GPUs learn together, and each GPU from a replay server of its own: for networks whose update is slow
# on four GPUs. The gradients go over the network. docs/learners.md says when that pays.
name                   = "apexrl-8-gpus"
learner_instance_types = ["g6.12xlarge"] # GPUs of one kind: the learners' networks have to stay the same
learner_gpus           = 4
learner_hosts          = 2
actor_hosts            = 12
