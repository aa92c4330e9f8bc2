// Package tmc is a client of the transaction message center: messages that are sent if and only if the local transaction commits.
//
//	client, err := tmc.Dial(tmc.Config{Addresses: []string{"127.0.0.1:50051"}, App: "orders", Key: key})
//	ledger, err := client.Ledger(ctx, db, tmc.PostgreSQL)
//	err = ledger.Transact(ctx, func(tx *tmc.Tx) error {
//		if _, err := tx.ExecContext(ctx, "UPDATE orders SET status = 'paid' WHERE id = $1", id); err != nil {
//			return err
//		}
//		tx.Send(tmc.Message{Topic: "order.paid", Key: fmt.Sprint("paid-", id), Body: body})
//		return nil
//	})
//
// A process that dies in between is asked for the outcome (Ledger.Checks). Consume hands messages to handlers, and an Inbox makes
// the effect of each happen once. See docs/wire.md of the center for the protocol.
package tmc

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	mathrand "math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	tmcv1 "tmc/v1"
)

// Config says which center, and who calls.
type Config struct {
	// Addresses of the center's servers, host:port each.
	Addresses []string
	// App and Key as registered at the center. A center without keys (tmc dev) takes every app.
	App, Key string
	// Tag is the environment, for topics that have several.
	Tag string
	// TLS of the connections to the center; nil: none.
	TLS *tls.Config
	// CheckAddress is the host:port where this service answers checks, for a center that has it recorded.
	CheckAddress string
	// Log gets what no caller hears of; nil: slog.Default().
	Log *slog.Logger
}

// Client is a connection to the center for any number of goroutines.
type Client struct {
	config   Config
	channel  *grpc.ClientConn
	messages tmcv1.MessageServiceClient
	consumed tmcv1.ConsumptionServiceClient
	produced *collector[*tmcv1.Operation, *tmcv1.OperationResult]
	log      *slog.Logger

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	busy   sync.WaitGroup // goroutines that Close waits for

	lock     sync.Mutex
	ledgerID string // hexadecimal, for the center; "": none
}

// Dial makes a client. It does not connect yet: calls do, and repeat until the center answers or their context ends.
func Dial(config Config) (*Client, error) {
	if len(config.Addresses) == 0 || config.App == "" {
		return nil, errors.New("tmc: Config needs Addresses and App")
	}
	security := insecure.NewCredentials()
	if config.TLS != nil {
		security = credentials.NewTLS(config.TLS)
	}
	servers := manual.NewBuilderWithScheme("tmc")
	state := resolver.State{}
	for _, address := range config.Addresses {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, fmt.Errorf("tmc: addresses are host:port: %w", err)
		}
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address, ServerName: host})
	}
	servers.InitialState(state)
	channel, err := grpc.NewClient("tmc:///center",
		grpc.WithResolvers(servers),
		grpc.WithTransportCredentials(security),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`), // after UNAVAILABLE, another server
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnecting, MinConnectTimeout: 5 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)),
	)
	if err != nil {
		return nil, fmt.Errorf("tmc: %w", err)
	}
	c := &Client{
		config: config, channel: channel, log: config.Log,
		messages: tmcv1.NewMessageServiceClient(channel), consumed: tmcv1.NewConsumptionServiceClient(channel),
	}
	if c.log == nil {
		c.log = slog.Default()
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	stream := &produceStream{client: c}
	c.produced = collect(c.ctx, stream.perform)
	return c, nil
}

// reconnecting: a server that is back is called within half a second.
var reconnecting = backoff.Config{BaseDelay: shortestPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestRepeat}

// Close ends the client, after it has noted which messages are settled. What it could not submit stays in the ledger.
func (c *Client) Close() error {
	c.lock.Lock()
	isFirst := c.ctx.Err() == nil
	c.cancel()
	c.lock.Unlock()
	c.busy.Wait()
	if !isFirst {
		return nil
	}
	return c.channel.Close()
}

// background runs work that Close waits for. Returns false: the client is closed, and it is not run.
func (c *Client) background(work func()) bool {
	c.lock.Lock()
	defer c.lock.Unlock()
	if c.ctx.Err() != nil {
		return false
	}
	c.busy.Go(work)
	return true
}

// calling returns ctx with who we are.
func (c *Client) calling(ctx context.Context) context.Context {
	pairs := []string{"tmc-app", c.config.App}
	if c.config.Key != "" {
		pairs = append(pairs, "authorization", "Bearer "+c.config.Key)
	}
	for _, pair := range [][2]string{
		{"tmc-tag", c.config.Tag}, {"tmc-check-address", c.config.CheckAddress}, {"tmc-check-ledger", c.ledger()},
	} {
		if pair[1] != "" {
			pairs = append(pairs, pair[0], pair[1])
		}
	}
	return metadata.NewOutgoingContext(ctx, metadata.Pairs(pairs...)) // nothing of the caller's
}

func (c *Client) ledger() string {
	c.lock.Lock()
	defer c.lock.Unlock()
	return c.ledgerID
}

// hasLedger notes the ledger of this client.
func (c *Client) hasLedger(id []byte) error {
	c.lock.Lock()
	defer c.lock.Unlock()
	if c.ledgerID != "" {
		return errors.New("tmc: this client has a ledger: make another client for another database")
	}
	c.ledgerID = hex.EncodeToString(id)
	return nil
}

// Error is how the center refuses a call. Match it with errors.As, and its Reason with docs/errors.md.
type Error struct {
	Code       codes.Code
	Reason     tmcv1.Reason
	Message    string
	Field      string        // of the request; "" if the refusal is not about one
	MessageID  string        // of the message that has the key already, with KEY_COMMITTED, KEY_IN_PROGRESS and CONTENT_DIFFERS
	RetryAfter time.Duration // when the same call may succeed; 0: the center does not say
}

func (e *Error) Error() string {
	if e.Reason == tmcv1.Reason_REASON_UNSPECIFIED {
		return fmt.Sprintf("tmc: %s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("tmc: %s %s: %s", e.Code, e.Reason, e.Message)
}

// isPassing says whether the same call may succeed later.
func (e *Error) isPassing() bool {
	switch e.Code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted:
		return true
	case codes.ResourceExhausted:
		return e.RetryAfter > 0 // else it is larger than the center takes
	}
	return false
}

// refusal returns what an item was refused for, or nil.
func refusal(item *tmcv1.ItemError) error {
	if item == nil || item.Code == 0 {
		return nil
	}
	return &Error{
		Code: codes.Code(item.Code), Reason: item.Reason, Message: item.Message, Field: item.Field, MessageID: item.MessageId,
		RetryAfter: time.Duration(item.RetryAfterMs) * time.Millisecond,
	}
}

// refused returns the error of a call as an Error.
func refused(err error) error {
	if err == nil {
		return nil
	}
	found := status.Convert(err)
	result := &Error{Code: found.Code(), Message: found.Message()}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			result.Reason = tmcv1.Reason(tmcv1.Reason_value[detail.Reason])
			result.MessageID = detail.Metadata["message_id"]
		case *errdetails.RetryInfo:
			result.RetryAfter = detail.RetryDelay.AsDuration()
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				result.Field = violation.Field
			}
		}
	}
	return result
}

const (
	shortestPause = 50 * time.Millisecond
	longestPause  = 2 * time.Second
	longestRepeat = 500 * time.Millisecond // of a call, while somebody waits
)

// hasReason says whether the center refused for one of these.
func hasReason(err error, reasons ...tmcv1.Reason) bool {
	var refusal *Error
	return errors.As(err, &refusal) && slices.Contains(reasons, refusal.Reason)
}

// repeated calls until there is an answer that stays, or ctx ends. Its error is then the last refusal, and ctx's.
// final: reasons that may pass, and are not waited for.
func repeated[A any](ctx context.Context, log *slog.Logger, call func() (A, error), final ...tmcv1.Reason) (A, error) {
	for pause, turn := shortestPause, 1; ; pause, turn = min(2*pause, longestRepeat), turn+1 {
		answer, err := call()
		var refusal *Error
		if err == nil || !errors.As(err, &refusal) || !refusal.isPassing() || slices.Contains(final, refusal.Reason) {
			if refusal != nil && ctx.Err() != nil {
				err = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
			}
			return answer, err
		}
		if turn%20 == 0 {
			log.Warn("tmc: a call is repeated until the center answers", "error", err)
		}
		wait := max(refusal.RetryAfter, pause/2+mathrand.N(pause/2)) // callers refused together do not return together
		if !sleep(ctx, wait) {
			return answer, fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		}
	}
}

// sleep returns whether ctx was still going on at the end.
func sleep(ctx context.Context, duration time.Duration) bool {
	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// NewAttempt returns 16 random bytes, which distinguish a repeated call from another transaction with the same key.
func NewAttempt() []byte {
	id := make([]byte, 16)
	rand.Read(id) // never fails, by its documentation
	return id
}

func nowMs() int64 { return time.Now().UnixMilli() }
