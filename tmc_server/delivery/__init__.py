"""Where copies leave the center; each module is one domain.ports.delivery.Outlet."""
