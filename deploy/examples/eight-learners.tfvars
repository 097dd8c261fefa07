# Two hosts of four GPUs learn together, and each GPU from a replay server of its own: for networks whose update is slow
# on four GPUs. The gradients go over the network. docs/learners.md says when that pays.
name                  = "apexrl-8-gpus"
learner_instance_type = "g6.12xlarge"
learner_gpus          = 4
learner_hosts         = 2
actor_hosts           = 12
