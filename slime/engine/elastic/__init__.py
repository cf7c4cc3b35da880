"""Elastic fleet: engines of other machines that join and leave a running job."""
