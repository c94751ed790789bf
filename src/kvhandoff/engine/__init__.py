"""What every engine integration shares: the driver of the protocol, its legs, its pages for the router."""
