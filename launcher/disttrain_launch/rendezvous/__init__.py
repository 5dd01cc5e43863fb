"""How nodes become a job, and stay one."""
