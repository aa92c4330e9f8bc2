module tmc

go 1.25.0

require (
	github.com/rabbitmq/amqp091-go v1.10.0
	golang.org/x/crypto v0.45.0
	golang.org/x/net v0.47.0
	google.golang.org/genproto/googleapis/rpc v0.0.0-20250804133106-a7a43d27e69b
	google.golang.org/grpc v1.76.0
	google.golang.org/protobuf v1.36.11
)

require (
	golang.org/x/sys v0.38.0 // indirect
	golang.org/x/text v0.31.0 // indirect
)
