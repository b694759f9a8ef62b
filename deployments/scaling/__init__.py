"""Ray Serve's autoscaling, with the project's own policy: translation only, the policy is `kvmanager.scaling`."""
