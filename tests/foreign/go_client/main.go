// A plain Go client, as a service without an SDK is one:
//
//	go_client keepalive ADDRESS SECONDS           idles with a keepalive of 10 s; fails when the connection does not stay up
//	go_client publish ADDRESS APP KEY WORKERS N   N messages of each worker over one channel; prints how often each status came
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
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

func main() {
	switch os.Args[1] {
	case "keepalive":
		stayUp(os.Args[2], number(os.Args[3]))
	case "publish":
		publish(os.Args[2], os.Args[3], os.Args[4], number(os.Args[5]), number(os.Args[6]))
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
	channel, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(encoded{})))
	fail(err)
	call := metadata.AppendToOutgoingContext(context.Background(), "tmc-app", app, "authorization", "Bearer "+key)
	counts, lock, all := map[string]int{}, sync.Mutex{}, sync.WaitGroup{}
	for worker := range workers {
		all.Go(func() {
			for turn := range each {
				deadline, stop := context.WithTimeout(call, time.Minute)
				request, answer := aMessage(fmt.Sprintf("%d-%d", worker, turn)), []byte{}
				err := channel.Invoke(deadline, "/tmc.v1.MessageService/Publish", &request, &answer)
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

// aMessage is an encoded PublishRequest: fields 1 topic, 2 key, 3 body, 6 attempt_id.
func aMessage(key string) []byte {
	attempt := make([]byte, 16)
	_, err := rand.Read(attempt)
	fail(err)
	request := []byte{}
	for field, value := range map[protowire.Number][]byte{1: []byte("order.paid"), 2: []byte(key), 3: []byte("{}"), 6: attempt} {
		request = protowire.AppendTag(request, field, protowire.BytesType)
		request = protowire.AppendBytes(request, value)
	}
	return request
}

// encoded passes messages on as the bytes that they already are.
type encoded struct{}

var _ encoding.Codec = encoded{}

func (encoded) Marshal(value any) ([]byte, error) { return *value.(*[]byte), nil }

func (encoded) Unmarshal(data []byte, value any) error {
	*value.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (encoded) Name() string { return "proto" }

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
