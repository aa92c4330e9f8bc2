// Idles with a keepalive of 10 s and fails when the connection does not stay up: go run . ADDRESS SECONDS
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
)

func main() {
	seconds, err := strconv.Atoi(os.Args[2])
	fail(err)
	channel, err := grpc.NewClient(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}))
	fail(err)
	_, err = grpc_health_v1.NewHealthClient(channel).Check(context.Background(), &grpc_health_v1.HealthCheckRequest{})
	fail(err)
	idle, stop := context.WithTimeout(context.Background(), time.Duration(seconds)*time.Second)
	defer stop()
	if channel.WaitForStateChange(idle, connectivity.Ready) {
		fail(fmt.Errorf("the connection left READY: %v", channel.GetState()))
	}
	fmt.Println("the connection stayed up")
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
