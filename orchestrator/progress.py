"""What a person sees while a run works: which boot, which bench, how far, how long still."""
