# The smallest cluster that has every part: to see that everything works in an account, for an hour.
name                   = "apexrl-smoke"
env                    = "PongNoFrameskip-v4"
preset                 = "two-cores"
max_hours              = 1
replay_instance_type   = "m6i.xlarge"
replay_volume_gib      = 30
learner_instance_types = ["g6.xlarge", "g5.xlarge"]
learner_volume_gib     = 100
actor_instance_types   = ["c7i.2xlarge"]
actor_hosts            = 1
