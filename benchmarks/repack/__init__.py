"""Moving trajectories between rollouts: NAMEs repack and planner."""
