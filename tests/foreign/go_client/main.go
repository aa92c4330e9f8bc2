// Go services, with the client of this project and with nothing but the stubs:
//
//	go_client keepalive ADDRESS SECONDS           idles with a keepalive of 10 s; fails when the connection does not stay up
//	go_client publish ADDRESS APP KEY WORKERS N   N messages of each worker over one channel; prints how often each status came
//	go_client shop ADDRESSES KEY DRIVER DSN CHECKS ORDERS, coupons ADDRESSES APP KEY DRIVER DSN USER PASSWORD   see shop.go
//	go_client checks ADDRESSES KEY DRIVER DSN GRPC HTTP, describe
//	go_client unary|stream ADDRESS KEY NAME WORKERS COUNT FOLDER   prepare and submit, as benchmarks/life.py does it
package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"sort"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	tmcv1 "tmc/v1"
)

func main() {
	switch os.Args[1] {
	case "keepalive":
		stayUp(os.Args[2], number(os.Args[3]))
	case "publish":
		publish(os.Args[2], os.Args[3], os.Args[4], number(os.Args[5]), number(os.Args[6]))
	case "unary", "stream":
		live(os.Args[1], os.Args[2], os.Args[3], os.Args[4], number(os.Args[5]), number(os.Args[6]), os.Args[7])
	case "shop":
		sellAll(os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6], number(os.Args[7]))
	case "coupons":
		countAll(os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6], os.Args[7], os.Args[8])
	case "checks":
		answer(os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6], os.Args[7])
	case "describe":
		describe()
	default:
		fail(fmt.Errorf("%s is no command", os.Args[1]))
	}
}

func stayUp(address string, seconds int) {
	channel, err := grpc.NewClient(address,
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

func publish(address, app, key string, workers, each int) {
	client, call := connect(address, app, key)
	counts, lock, all := map[string]int{}, sync.Mutex{}, sync.WaitGroup{}
	for worker := range workers {
		all.Go(func() {
			for turn := range each {
				deadline, stop := context.WithTimeout(call, time.Minute)
				_, err := client.Publish(deadline, &tmcv1.PublishRequest{
					Topic: "order.paid", Key: fmt.Sprintf("%d-%d", worker, turn), Body: []byte("{}"), AttemptId: attempt(),
				})
				stop()
				lock.Lock()
				counts[status.Code(err).String()]++
				lock.Unlock()
			}
		})
	}
	all.Wait()
	statuses := make([]string, 0, len(counts))
	for name := range counts {
		statuses = append(statuses, name)
	}
	sort.Strings(statuses)
	for _, name := range statuses {
		fmt.Println(name, counts[name])
	}
}

// connect returns a client and the context of its calls.
func connect(address, app, key string) (tmcv1.MessageServiceClient, context.Context) {
	channel, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	fail(err)
	call := metadata.AppendToOutgoingContext(context.Background(), "tmc-app", app, "authorization", "Bearer "+key)
	return tmcv1.NewMessageServiceClient(channel), call
}

func attempt() []byte {
	id := make([]byte, 16)
	_, err := rand.Read(id)
	fail(err)
	return id
}

func number(text string) int {
	value, err := strconv.Atoi(text)
	fail(err)
	return value
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
